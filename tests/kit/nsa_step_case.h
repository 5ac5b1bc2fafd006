// Steps of native sparse attention: cases, their tensors, and what is right, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <ostream>
#include <random>
#include <vector>

#include "heddle/nsa.h"
#include "kit/compare.h"
#include "kit/host_tensor.h"
#include "kit/plain_layers.h"

namespace heddle::kit {

struct NsaStepCase {
  const char* name;
  DType dtype;
  std::int64_t H, G, D, Dv, capacity;
  std::vector<std::int64_t> lengths;  // of each sequence, before the step
  std::int64_t block, count, window;
  bool compressed = true;  // there is a g_cmp
  ForcedBlocks forced = {};
  bool tied = false;  // all keys are alike, so that all blocks' scores are
  DType gates = DType::f32;
  Layout rows = Layout::contiguous;  // of q, k_new, v_new and out
};

inline void PrintTo(const NsaStepCase& c, std::ostream* out) { *out << c.name; }

inline const std::vector<NsaStepCase>& nsa_step_cases() {
  using enum DType;
  static const std::vector<NsaStepCase> cases = {
      // Of one sequence a cluster has eight CTAs, of 20 four, of 40 two, of 70 one.
      {"one_head", bf16, 1, 1, 64, 64, 400, {200}, 64, 2, 70},
      {"first_key", bf16, 2, 4, 128, 128, 300, {0}, 64, 16, 100},
      {"second_key", f16, 2, 4, 64, 64, 300, {1}, 64, 16, 100},
      {"completes_the_first", bf16, 2, 16, 128, 128, 300, {63}, 64, 16, 100},
      {"after_the_first", bf16, 2, 16, 128, 128, 300, {64}, 64, 16, 100},
      {"completes_a_later", f16, 2, 4, 128, 128, 3000, {2047, 2048, 2046}, 64, 7, 130},
      {"lengths_apart", bf16, 4, 16, 128, 128, 2600, {2500, 3, 1279}, 64, 5, 512},
      {"full_after", bf16, 2, 4, 128, 128, 640, {639, 638}, 64, 4, 100},
      {"odd_capacity", f16, 2, 4, 64, 64, 650, {649, 640}, 64, 4, 100},
      {"no_room", bf16, 2, 4, 128, 128, 640, {640, 647, -3, 100}, 64, 4, 100},
      {"no_window", bf16, 2, 16, 128, 128, 2000, {1800, 77}, 64, 5, 0},
      {"not_compressed", bf16, 2, 16, 128, 128, 2000, {1800, 63}, 64, 5, 100, false},
      {"chosen_alone", f16, 2, 4, 128, 128, 2000, {1800, 63}, 64, 5, 0, false},
      {"wide_window", bf16, 1, 4, 128, 128, 2000, {1999, 5}, 64, 3, 4000},
      {"window_of_one", bf16, 1, 4, 64, 64, 700, {699, 0}, 64, 3, 1},
      {"blocks_of_16", bf16, 2, 5, 64, 64, 3000, {2900, 15}, 16, 32, 100},
      {"blocks_of_32", f16, 2, 16, 128, 128, 3000, {2943, 31}, 32, 11, 40},
      {"blocks_of_128", bf16, 2, 3, 128, 128, 5000, {4991, 127}, 128, 6, 40},
      {"head_72", bf16, 2, 4, 72, 72, 900, {831, 40}, 64, 4, 100},
      {"head_40", f16, 3, 7, 40, 40, 900, {831, 40}, 64, 4, 100},
      {"heads_apart", bf16, 2, 4, 64, 128, 900, {831, 40}, 64, 4, 100},
      {"heads_apart_too", f16, 2, 4, 96, 32, 900, {831, 40}, 64, 4, 100},
      {"nothing_forced", bf16, 2, 16, 128, 128, 2000, {1800, 127, 5}, 64, 5, 100, true, {false, false, false}},
      {"current_alone", bf16, 2, 16, 128, 128, 2000, {1800, 127}, 64, 2, 100, true, {false, false, true}},
      {"forced_alone", bf16, 2, 16, 128, 128, 2000, {1800, 127}, 64, 3, 100},
      {"one_slot", bf16, 2, 4, 128, 128, 2000, {1800}, 64, 1, 100},
      {"no_slot", bf16, 2, 4, 128, 128, 2000, {1800}, 64, 0, 100},
      {"tied", bf16, 2, 16, 128, 128, 5000, {4800, 1000}, 64, 16, 100, true, {}, true},
      {"tied_in_16", f16, 1, 4, 64, 64, 5000, {4800}, 16, 32, 0, true, {}, true},
      {"gates_bf16", bf16, 2, 4, 128, 128, 500, {400}, 64, 4, 100, true, {}, false, bf16},
      {"gates_f16", bf16, 2, 4, 128, 128, 500, {400}, 64, 4, 100, true, {}, false, f16},
      {"padded_rows", bf16, 2, 4, 128, 128, 500, {447, 400}, 64, 4, 100, true, {}, false, f32, Layout::padded_rows},
      {"heads_first", f16, 2, 4, 64, 64, 500, {447, 400}, 64, 4, 100, true, {}, false, f32, Layout::heads_first},
      {"long", bf16, 1, 16, 128, 128, 20000, {19967, 4000}, 64, 16, 512},
      {"twenty", bf16, 1, 4, 64, 64, 500, std::vector<std::int64_t>(20, 447), 64, 4, 100},
      {"forty", bf16, 1, 4, 128, 128, 1500, std::vector<std::int64_t>(40, 1407), 64, 4, 100},
      {"seventy", f16, 1, 4, 128, 128, 1500, std::vector<std::int64_t>(70, 1407), 64, 4, 100},
  };
  return cases;
}

struct NsaStepData {
  NsaStepCase s;
  HostTensor q, k_new, v_new, k, v, k_pooled, v_pooled, lengths, g_cmp, g_slc, g_swa;
  NsaStepOptions options;

  // sequences: of the case's, these alone; all if empty. What a sequence has does not depend on the others.
  explicit NsaStepData(const NsaStepCase& c, const std::vector<std::int64_t>& sequences = {}) : s(c) {
    std::vector<std::int64_t> of = sequences;
    if (of.empty()) {
      of.resize(c.lengths.size());
      std::iota(of.begin(), of.end(), 0);
    }
    s.lengths.clear();
    for (const std::int64_t n : of) s.lengths.push_back(c.lengths[n]);
    const std::int64_t pooled = s.capacity / s.block;
    q = HostTensor::input(s.dtype, {B(), 1, s.H * s.G, s.D}, s.rows);
    k_new = HostTensor::input(s.dtype, {B(), 1, s.H, s.D}, s.rows);
    v_new = HostTensor::input(s.dtype, {B(), 1, s.H, s.Dv}, s.rows);
    k = HostTensor::output(s.dtype, {B(), s.capacity, s.H, s.D});
    v = HostTensor::output(s.dtype, {B(), s.capacity, s.H, s.Dv});
    k_pooled = HostTensor::output(s.dtype, {B(), pooled, s.H, s.D});
    v_pooled = HostTensor::output(s.dtype, {B(), pooled, s.H, s.Dv});
    lengths = HostTensor::input(DType::i32, {B()});
    g_slc = HostTensor::input(s.gates, {B(), 1, s.H * s.G});
    if (s.compressed) g_cmp = HostTensor::input(s.gates, {B(), 1, s.H * s.G});
    if (s.window > 0) g_swa = HostTensor::input(s.gates, {B(), 1, s.H * s.G});
    for (std::int64_t b = 0; b < B(); ++b) {
      std::mt19937 random(static_cast<unsigned>(7 + of[b]));
      std::normal_distribution<double> normal;
      lengths.set(b, static_cast<double>(s.lengths[b]));
      const auto fill = [&](HostTensor& x, std::int64_t rows) {
        const std::int64_t each = B() == 0 ? 0 : x.elements() / B(),
                           row = each / std::max<std::int64_t>(1, x.view().shape[1]);
        for (std::int64_t n = 0; n < rows * row; ++n) x.set(b * each + n, normal(random));
      };
      fill(q, 1);
      fill(k_new, 1);
      fill(v_new, 1);
      // Positive, so that branches which are alike do not leave of each other what rounding makes of them.
      for (HostTensor* gate : {&g_cmp, &g_slc, &g_swa}) {
        if (!gate->given()) continue;
        fill(*gate, 1);
        for (std::int64_t n = b * s.H * s.G; n < (b + 1) * s.H * s.G; ++n) gate->set(n, 0.25 + std::abs(gate->get(n)));
      }
      // Rows behind a sequence's end stay NaN.
      const std::int64_t before = std::clamp<std::int64_t>(s.lengths[b], 0, s.capacity);
      fill(k, before);
      fill(v, before);
      if (s.tied) {
        const std::int64_t row = s.H * s.D;
        for (std::int64_t n = 0; n < row; ++n) k_new.set(b * row + n, 0.25 * static_cast<double>(n % 5));
        for (std::int64_t n = 0; n < before * row; ++n) k.set(b * s.capacity * row + n, k_new.get(b * row + n % row));
      }
    }
    extend(k, k_pooled, 0, s.capacity);
    extend(v, v_pooled, 0, s.capacity);
    options.block_size = s.block;
    options.block_count = s.count;
    options.window = s.window;
    options.forced = s.forced;
  }

  std::int64_t B() const { return static_cast<std::int64_t>(s.lengths.size()); }
  std::int64_t keys(std::int64_t b) const { return std::clamp<std::int64_t>(s.lengths[b] + 1, 0, s.capacity); }
  bool appends(std::int64_t b) const { return s.lengths[b] >= 0 && s.lengths[b] < s.capacity; }
  NsaGates gates() const { return {g_cmp.view(), g_slc.view(), g_swa.view()}; }
  NsaCache cache() const { return {k.view(), v.view(), k_pooled.view(), v_pooled.view(), lengths.view()}; }
  HostTensor out() const { return HostTensor::output(s.dtype, {B(), 1, s.H * s.G, s.Dv}, s.rows); }

  // What the step leaves of the cache.
  void append() {
    for (std::int64_t b = 0; b < B(); ++b) {
      if (!appends(b)) continue;
      const auto put = [&](const HostTensor& from, HostTensor& to, std::int64_t row) {
        for (std::int64_t n = 0; n < row; ++n) to.set((b * s.capacity + s.lengths[b]) * row + n, from.get(b * row + n));
      };
      put(k_new, k, s.H * s.D);
      put(v_new, v, s.H * s.Dv);
    }
    extend(k, k_pooled, 1, 1);
    extend(v, v_pooled, 1, 1);
  }

  // What a sequence's out, [H G, Dv], is held to, of a cache to which the step was appended. e is a sequence's own: o
  // of few keys is larger than o of many. Plainly, each branch is a call, whose P and o are rounded, over the blocks
  // that are right.
  struct Expected {
    std::vector<double> exact;
    PlainTensor plain;
  };
  Expected expected(std::int64_t b) const {
    const std::vector<std::vector<std::int64_t>> chosen = keys_chosen(b);
    Expected out{outputs<double>({}, b, chosen), {}};
    for (const Order order : kOrders) out.plain.values.push_back(outputs<float>({s.dtype, order}, b, chosen));
    return out;
  }

  // [B, H G, Dv], in double.
  std::vector<double> exact() const {
    std::vector<double> out;
    for (std::int64_t b = 0; b < B(); ++b) {
      const std::vector<double> of = outputs<double>({}, b, keys_chosen(b));
      out.insert(out.end(), of.begin(), of.end());
    }
    return out;
  }

 private:
  static std::vector<std::int64_t> every(std::int64_t begin, std::int64_t end) {
    std::vector<std::int64_t> out(std::max<std::int64_t>(0, end - begin));
    std::iota(out.begin(), out.end(), begin);
    return out;
  }

  double score(const HostTensor& keys, std::int64_t b, std::int64_t head, std::int64_t key) const {
    double dot = 0;
    for (std::int64_t d = 0; d < s.D; ++d) {
      dot += q.get((b * s.H * s.G + head) * s.D + d) *
             keys.get(((b * keys.view().shape[1] + key) * s.H + head / s.G) * s.D + d);
    }
    return dot / std::sqrt(static_cast<double>(s.D));
  }

  // Of each key/value head.
  std::vector<std::vector<std::int64_t>> keys_chosen(std::int64_t b) const {
    std::vector<std::vector<std::int64_t>> chosen(s.H);
    for (std::int64_t h = 0; h < s.H; ++h) {
      for (const std::int64_t block : blocks(b, h)) {
        for (std::int64_t key = block * s.block; key < std::min(keys(b), (block + 1) * s.block); ++key) {
          chosen[h].push_back(key);
        }
      }
    }
    return chosen;
  }

  // chosen: keys of each key/value head.
  template <class T>
  std::vector<double> outputs(const PlainLayers<T>& how, std::int64_t b,
                              const std::vector<std::vector<std::int64_t>>& chosen) const {
    const auto D = static_cast<std::size_t>(s.D), Dv = static_cast<std::size_t>(s.Dv);
    const std::int64_t end = keys(b);
    std::vector<double> out;
    for (std::int64_t h = 0; h < s.H; ++h) {
      ModelRows<T> queries, sums(s.G, std::vector<T>(Dv));
      for (std::int64_t g = 0; g < s.G; ++g) queries.push_back(row<T>(q, b, 0, h * s.G + g));
      const auto add = [&](const HostTensor& gate, const HostTensor& of, const HostTensor& values,
                           const std::vector<std::int64_t>& rows) {
        if (!gate.given()) return;
        ModelRows<T> o(s.G, std::vector<T>(Dv));
        const ModelRows<T> k_rows = rows_of<T>(of, b, rows, h), v_rows = rows_of<T>(values, b, rows, h);
        how.attend({queries, 0, D}, {k_rows, 0, D}, {v_rows, 0, Dv}, false, o, 0);
        for (std::int64_t g = 0; g < s.G; ++g) {
          const T by = static_cast<T>(gate.get((b * s.H + h) * s.G + g));
          for (std::size_t d = 0; d < Dv; ++d) sums[g][d] += by * o[g][d];
        }
      };
      add(g_cmp, k_pooled, v_pooled, every(0, end / s.block));
      add(g_slc, k, v, chosen[h]);
      add(g_swa, k, v, every(std::max<std::int64_t>(0, end - s.window), end));
      for (const std::vector<T>& sum : sums) {
        for (const T x : sum) out.push_back(how.round(x));
      }
    }
    return out;
  }

  // Row n of head h in sequence b of x, [B, rows, heads, width].
  template <class T>
  static std::vector<T> row(const HostTensor& x, std::int64_t b, std::int64_t n, std::int64_t h) {
    const auto& shape = x.view().shape;
    std::vector<T> out;
    for (std::int64_t d = 0; d < shape[3]; ++d) {
      out.push_back(static_cast<T>(x.get(((b * shape[1] + n) * shape[2] + h) * shape[3] + d)));
    }
    return out;
  }
  template <class T>
  static ModelRows<T> rows_of(const HostTensor& x, std::int64_t b, const std::vector<std::int64_t>& rows,
                              std::int64_t h) {
    ModelRows<T> out;
    for (const std::int64_t n : rows) out.push_back(row<T>(x, b, n, h));
    return out;
  }

  double lse(std::int64_t b, std::int64_t head, std::int64_t pooled) const {
    if (pooled == 0) return -std::numeric_limits<double>::infinity();
    std::vector<double> scores;
    for (std::int64_t n = 0; n < pooled; ++n) scores.push_back(score(k_pooled, b, head, n));
    const double top = *std::ranges::max_element(scores);
    double sum = 0;
    for (const double x : scores) sum += std::exp(x - top);
    return top + std::log(sum);
  }

  // The list of a key/value head: forced blocks, then the best.
  std::vector<std::int64_t> blocks(std::int64_t b, std::int64_t h) const {
    const std::int64_t end = keys(b), complete = end / s.block, current = (end - 1) / s.block;
    if (end == 0) return {};
    std::vector<std::int64_t> list;
    const auto add = [&](bool forced, std::int64_t block) {
      if (forced && block >= 0 && std::ranges::find(list, block) == list.end()) list.push_back(block);
    };
    add(s.forced.first, 0);
    add(s.forced.previous, current - 1);
    add(s.forced.current, current);
    std::vector<double> importance(complete);
    for (std::int64_t g = 0; g < s.G; ++g) {
      const std::int64_t head = h * s.G + g;
      const double all = lse(b, head, complete);
      for (std::int64_t c = 0; c < complete; ++c) importance[c] += std::exp(score(k_pooled, b, head, c) - all);
    }
    // Scores of tied blocks are the same numbers, but for the order of this function's sums, which is one.
    std::vector<std::int64_t> others = every(0, complete);
    std::ranges::stable_sort(others, [&](std::int64_t x, std::int64_t y) { return importance[x] > importance[y]; });
    for (const std::int64_t block : others) {
      if (std::ranges::find(list, block) == list.end()) list.push_back(block);
    }
    if (static_cast<std::int64_t>(list.size()) > s.count) list.resize(s.count);
    return list;
  }

  // The CPU's means of the blocks that end among the last `appended` of lengths + more keys.
  void extend(const HostTensor& x, HostTensor& pooled, std::int64_t more, std::int64_t appended) const {
    HostTensor used = HostTensor::input(DType::i32, {B()});
    for (std::int64_t b = 0; b < B(); ++b) {
      used.set(b, static_cast<double>(std::clamp<std::int64_t>(s.lengths[b] + more, 0, s.capacity)));
    }
    PoolOptions of;
    of.block = of.stride = s.block;
    of.seqused = used.view();
    of.appended = appended;
    extend_pooled_keys(x.view(), pooled.view(), of);
  }
};

}  // namespace heddle::kit
