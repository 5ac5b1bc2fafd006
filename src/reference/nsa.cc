#include "reference/nsa.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dtypes.h"

namespace heddle::reference {
namespace {

using std::int64_t;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double element(const Operand& x, int64_t b, int64_t i, int64_t h, int64_t d) {
  return load_element(x.at(b, i, h), x.dtype, d * x.stride_d);
}

// visit(batch, sequence) of each one; batch: of packed data 0.
template <class Visit>
void each_sequence(const PoolProblem& p, const Visit& visit) {
  for (int64_t b = 0; b < p.B; ++b) visit(p.packed() ? 0 : b, p.sequence(b));
}

// Contiguous values into x, of `rows` rows a batch; only_new: of them those that keys which were appended complete.
void store(const PoolProblem& p, const std::vector<double>& values, const Operand& x, int64_t rows,
           bool only_new = false) {
  std::size_t at = 0;
  for (int64_t b = 0; b < p.batches(); ++b) {
    const PoolProblem::Sequence s = p.sequence(b);
    for (int64_t i = 0; i < rows; ++i) {
      if (only_new && (i < s.before || i >= s.pooled)) {
        at += static_cast<std::size_t>(p.H * p.D);
        continue;
      }
      for (int64_t h = 0; h < p.H; ++h) {
        for (int64_t d = 0; d < p.D; ++d, ++at) {
          store_element(x.at(b, i, h), x.dtype, d * x.stride_d, static_cast<float>(values[at]));
        }
      }
    }
  }
}

double dot(const SelectProblem& p, int64_t b, const Sequence& s, int64_t i, int64_t h, int64_t c) {
  double sum = 0;
  for (int64_t d = 0; d < p.D; ++d) {
    const std::byte* k = p.key_row(p.k, b, s, c, h / p.G);
    sum += element(p.q, b, s.q_begin + i, h, d) * load_element(k, p.k.dtype, d * p.k.stride_d);
  }
  return sum;
}

void launch_select(const SelectProblem& p, const Runtime&) {
  for (int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    for (int64_t i = 0; i < s.q_rows; ++i) {
      for (int64_t h = 0; h < p.Hkv; ++h) {
        const std::vector<std::int32_t> list = chosen_blocks(p, block_scores(p, b, i, h), p.position(s, i));
        std::ranges::copy(list, p.list(b, s, i, h));
      }
    }
  }
}

template <class Problem>
std::string describe(const Problem&, int) {
  return "plain loops in double precision, on one thread";
}

}  // namespace

std::vector<double> pool_keys(const PoolProblem& p) {
  std::vector<double> out(p.batches() * p.N * p.H * p.D);
  each_sequence(p, [&](int64_t b, const PoolProblem::Sequence& s) {
    for (int64_t c = 0; c < s.pooled; ++c) {
      for (int64_t h = 0; h < p.H; ++h) {
        for (int64_t d = 0; d < p.D; ++d) {
          double sum = 0;
          for (int64_t j = 0; j < p.block; ++j) sum += element(p.x, b, s.x_begin + c * p.stride + j, h, d);
          out[((b * p.N + s.pooled_begin + c) * p.H + h) * p.D + d] = sum / static_cast<double>(p.block);
        }
      }
    }
  });
  return out;
}

std::vector<double> pool_keys_backward(const PoolBackwardProblem& p) {
  std::vector<double> out(p.batches() * p.S * p.H * p.D);
  each_sequence(p, [&](int64_t b, const PoolProblem::Sequence& s) {
    for (int64_t c = 0; c < s.pooled; ++c) {
      for (int64_t j = 0; j < p.block; ++j) {
        for (int64_t h = 0; h < p.H; ++h) {
          for (int64_t d = 0; d < p.D; ++d) {
            out[((b * p.S + s.x_begin + c * p.stride + j) * p.H + h) * p.D + d] +=
                element(p.pooled, b, s.pooled_begin + c, h, d) / static_cast<double>(p.block);
          }
        }
      }
    }
  });
  return out;
}

std::vector<double> block_scores(const SelectProblem& p, int64_t b, int64_t i, int64_t kv_head) {
  const Sequence s = p.sequence(b);
  const int64_t seen = p.seen(s, p.position(s, i));
  std::vector<double> p_cmp(seen), x(seen);
  for (int64_t h = kv_head * p.G; h < (kv_head + 1) * p.G; ++h) {
    double largest = -kInfinity, sum = 0;
    for (int64_t c = 0; c < seen; ++c) {
      x[c] = p.scale * dot(p, b, s, i, h, c);
      largest = std::fmax(largest, x[c]);
    }
    for (int64_t c = 0; c < seen; ++c) sum += std::exp(x[c] - largest);
    const double lse = p.lse ? p.lse.as<const float>()[p.lse.offset(b, h, s.q_begin + i)] : largest + std::log(sum);
    for (int64_t c = 0; c < seen; ++c) p_cmp[c] += std::exp(x[c] - lse);
  }
  std::vector<double> p_slc(p.touched(seen));
  for (int64_t j = 0; j < std::ssize(p_slc); ++j) {
    for (int64_t m = 0; m < p.wide(); ++m) {
      for (int64_t n = 0; n < p.narrow(); ++n) {
        const int64_t c = p.wide() * j + m - n;
        if (c >= 0 && c < seen) p_slc[j] += p_cmp[c];
      }
    }
  }
  return p_slc;
}

std::vector<std::int32_t> chosen_blocks(const SelectProblem& p, const std::vector<double>& scores, int64_t t) {
  const SelectProblem::Forced forced = p.forced_at(t);
  std::vector<std::int32_t> list(forced.blocks, forced.blocks + forced.count), others;
  for (int64_t j = 0; j < std::ssize(scores); ++j) {
    if (!forced.holds(j) && !std::isnan(scores[j])) others.push_back(static_cast<std::int32_t>(j));
  }
  std::ranges::stable_sort(others, [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });
  list.insert(list.end(), others.begin(), others.end());
  list.resize(p.slots, -1);
  return list;
}

// Like that of attention: never the least.
const PoolKernel kPoolKeys = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = [](const PoolProblem& p, int) { return p.bytes() / 1e7; },
    .workspace = no_workspace,
    .launch = [](const PoolProblem& p, const Runtime&) { store(p, pool_keys(p), p.pooled, p.N, p.appended > 0); },
    .describe = describe<PoolProblem>,
};

const PoolBackwardKernel kPoolKeysBackward = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = [](const PoolBackwardProblem& p, int) { return p.bytes() / 1e7; },
    .workspace = no_workspace,
    .launch = [](const PoolBackwardProblem& p, const Runtime&) { store(p, pool_keys_backward(p), p.x, p.S); },
    .describe = describe<PoolBackwardProblem>,
};

const SelectKernel kSelectBlocks = {
    .name = "reference",
    .method = "reference",
    .device = Device::cpu,
    .automatic = false,
    .supports = serves_all,
    .estimate = [](const SelectProblem& p,
                   int) { return static_cast<double>(p.B * p.H * p.Sq) * static_cast<double>(p.Sk * p.D) / 1e7; },
    .workspace = no_workspace,
    .launch = launch_select,
    .describe = describe<SelectProblem>,
};

}  // namespace heddle::reference
