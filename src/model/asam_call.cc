#include "model/asam_call.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/row_ops.h"
#include "heddle/partial.h"

namespace heddle {
namespace {

void norm_rows(const HeldNorm& norm, const float* x, std::int64_t rows, std::int64_t columns, float* y) {
  for (std::int64_t i = 0; i < rows; ++i) {
    cpu::kernels().linear.norm_row(norm.parameters(), reinterpret_cast<const std::byte*>(x + i * columns), DType::f32,
                                   columns, reinterpret_cast<std::byte*>(y + i * columns), DType::f32);
  }
}

}  // namespace

AsamLayer::Call::Call(const Weights& weights, std::int64_t batch, std::int64_t length, Executor& executor)
    : weights_(weights),
      config_(weights.config),
      batch_(batch),
      length_(length),
      total_(batch * length),
      executor_(executor) {
  CpuPlaces places, of_worker;
  const auto take = [](CpuPlaces& from, std::size_t element, std::int64_t count) {
    return from.take(element * static_cast<std::size_t>(count));
  };
  const std::int64_t rows = whole_steps(total_), inner = weights.inner(), dim = config_.dim, tiles = blocks();
  x_ = take(places, sizeof(float), rows * dim);
  rows_ = take(places, sizeof(float), rows * std::max(dim, inner));
  qkv_ = take(places, sizeof(float), rows * 3 * inner);
  blocks_ = take(places, sizeof(std::int32_t), batch * tiles * heads() * most_entries());
  counts_ = take(places, sizeof(std::int32_t), batch * tiles * heads());
  if (AsamSelection(config_, weights.selection, batch, length, nullptr).clusters()) {
    row_clusters_ = take(places, sizeof(std::int32_t), batch * tiles * heads());
    key_clusters_ = take(places, sizeof(std::int32_t), batch * tiles * heads());
  }
  if (weights.gate) {
    gate_.emplace(*weights.gate, batch, length, prefixes(), config_.causal ? config_.block_size : 0, places, of_worker);
    choices_ = take(places, sizeof(std::int32_t), batch * prefixes() * heads());
  }
  if (soft()) {
    rest_ = take(places, sizeof(float), total_ * inner);
    lse_ = take(places, sizeof(float), total_ * heads());
    rest_lse_ = take(places, sizeof(float), total_ * heads());
  }
  attention_bytes_ = attention_bytes();
  attention_ = places.take(attention_bytes_);
  kept_ = take(of_worker, sizeof(std::uint8_t), tiles);
  ranks_ = take(of_worker, sizeof(std::uint64_t), tiles);
  normed_ = take(of_worker, sizeof(float), kLinearRows * dim);
  wide_ = take(of_worker, sizeof(float), kLinearRows * 4 * dim);
  sums_ = take(of_worker, sizeof(float), kLinearRows * dim);
  std::size_t linear = 0;
  for (const FloatLinear* layer : {&weights.qkv, &weights.out, &weights.up, &weights.down}) {
    linear = std::max(linear, layer->scratch_bytes());
  }
  linear_ = of_worker.take(linear);
  workers_ = places.bytes();
  worker_bytes_ = of_worker.bytes();
  bytes_ = workers_ + worker_bytes_ * static_cast<std::size_t>(executor.workers());
}

// All blocks, unless a pattern that has fewer is all that is attended.
std::int64_t AsamLayer::Call::most_entries() const {
  if (weights_.gate) return blocks();
  return AsamSelection(config_, weights_.selection, batch_, length_, nullptr).most(config_.pattern_type);
}

void AsamLayer::Call::run(const TensorView& x, const TensorView& y, const AsamOptions& options, const AsamInfo& info,
                          std::byte* workspace) {
  workspace_ = workspace;
  const auto* lengths = static_cast<const std::int32_t*>(options.lengths.data);
  const AsamSelection selection(config_, weights_.selection, batch_, length_, lengths);
  project(x);
  if (gate_) {
    scores_ = gate_->run(executor_, at<float>(rows_), lengths, workspace, workspace + workers_, worker_bytes_);
    choose();
  }
  if (selection.clusters()) {
    const std::int64_t inner = weights_.inner(), stride = 3 * inner;
    selection.find_clusters(executor_, {at<float>(qkv_), stride}, {at<float>(qkv_) + inner, stride},
                            at<std::int32_t>(row_clusters_), at<std::int32_t>(key_clusters_));
  }
  list(Keys::attended, selection);
  if (info.patterns.given() || info.gate_values.given() || info.confidence.given() || info.pattern_logits.given() ||
      info.sparse_ratio.given()) {
    tell(info, selection);
  }
  // norm(x) is not wanted any more: its place is the result's.
  attend(at<float>(rows_), soft() ? at<float>(lse_) : nullptr, options.lengths);
  if (soft()) {
    list(Keys::rest, selection);
    attend(at<float>(rest_), at<float>(rest_lse_), options.lengths);
    join();
  }
  finish(y);
}

// The residual stream, norm(x), queries, keys and values.
void AsamLayer::Call::project(const TensorView& x) {
  const std::int64_t dim = config_.dim, wide = 3 * weights_.inner();
  over_rows(executor_, total_, [&](std::int64_t first, std::int64_t rows, int worker) {
    float *stream = at<float>(x_) + first * dim, *normed = at<float>(rows_) + first * dim;
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t b = (first + i) / length_, t = (first + i) % length_;
      std::memcpy(stream + i * dim, static_cast<const float*>(x.data) + b * x.stride[0] + t * x.stride[1],
                  sizeof(float) * static_cast<std::size_t>(dim));
    }
    norm_rows(weights_.norm, stream, rows, dim, normed);
    weights_.qkv.run(normed, at<float>(qkv_) + first * wide, rows, scratch<void>(worker, linear_));
  });
}

// The pattern of each head: the largest of the logits and what is the head's own.
void AsamLayer::Call::choose() {
  auto* choices = at<std::int32_t>(choices_);
  for (std::int64_t i = 0; i < batch_ * prefixes() * heads(); ++i) {
    choices[i] = static_cast<std::int32_t>(config_.pattern_type);
    if (config_.pattern_type != AsamPattern::adaptive) continue;
    const float* logits = scores_.patterns + i / heads() * kAsamChoices;
    const float* bias = weights_.selection.head_bias.data() + i % heads() * kAsamChoices;
    choices[i] = 0;
    for (std::int32_t n = 1; n < kAsamChoices; ++n) {
      if (logits[n] + bias[n] > logits[choices[i]] + bias[choices[i]]) choices[i] = n;
    }
  }
}

AsamPattern AsamLayer::Call::pattern_of(const AsamBlock& block) const {
  if (!gate_) return config_.pattern_type;
  return static_cast<AsamPattern>(at<std::int32_t>(choices_)[score_at(block.b, block.n) * heads() + block.head]);
}

// The blocks of keys of each block of rows: the pattern's, or all where a hard gate wants them; or the others.
void AsamLayer::Call::list(Keys keys, const AsamSelection& selection) {
  const std::int64_t tiles = blocks(), entries = most_entries();
  const auto *of_rows = at<std::int32_t>(row_clusters_), *of_keys = at<std::int32_t>(key_clusters_);
  parallel_for(executor_, batch_ * tiles, [&](std::int64_t index, int worker) {
    const std::int64_t b = index / tiles, n = index % tiles, left = selection.left(b, n);
    auto* kept = scratch<std::uint8_t>(worker, kept_);
    for (std::int64_t h = 0; h < heads(); ++h) {
      if (gate_ && !soft() && scores_.logits[score_at(b, n) * heads() + h] <= 0) {
        std::fill_n(kept, left, std::uint8_t{1});
      } else {
        const AsamBlock block{b, h, n};
        selection.mark(pattern_of(block), block, of_rows, of_keys, kept, scratch<std::uint64_t>(worker, ranks_));
      }
      std::int32_t* to = at<std::int32_t>(blocks_) + (index * heads() + h) * entries;
      std::int32_t count = 0;
      for (std::int64_t c = 0; c < left; ++c) {
        if ((kept[c] != 0) == (keys == Keys::attended)) to[count++] = static_cast<std::int32_t>(c);
      }
      at<std::int32_t>(counts_)[index * heads() + h] = count;
    }
  });
}

BlockLists AsamLayer::Call::lists(const TensorView& blocks, const TensorView& counts) const {
  BlockLists out;
  out.blocks = blocks;
  out.counts = counts;
  out.block_size = out.query_rows = config_.block_size;
  return out;
}

AttentionOptions AsamLayer::Call::attention_options(const TensorView& lengths) const {
  AttentionOptions options;
  options.causal = config_.causal ? Causal::top_left : Causal::none;
  options.seqused_k = lengths;
  return options;
}

// q, k or v, which have no data before there is a workspace.
TensorView AsamLayer::Call::of_qkv(int part) const {
  const std::int64_t inner = weights_.inner(), row = 3 * inner;
  const float* data = workspace_ == nullptr ? nullptr : at<float>(qkv_) + part * inner;
  return TensorView(data, DType::f32, {batch_, length_, heads(), config_.dim_head},
                    {length_ * row, row, config_.dim_head, 1});
}

// Of any lists: the host reads index data in questions too, so they are asked with one list that stands for all.
std::size_t AsamLayer::Call::attention_bytes() const {
  const std::vector<std::int32_t> list(static_cast<std::size_t>(most_entries()));
  const std::int32_t count = 0;
  const BlockLists stand_ins =
      lists(TensorView(list.data(), DType::i32, {batch_, blocks(), heads(), most_entries()}, {0, 0, 0, 1}),
            TensorView(&count, DType::i32, {batch_, blocks(), heads()}, {0, 0, 0}));
  Runtime runtime;
  runtime.executor = &executor_;
  return sparse_attention_forward_workspace(of_qkv(0), of_qkv(1), of_qkv(2), stand_ins, attention_options({}), runtime);
}

void AsamLayer::Call::attend(float* o, float* lse, const TensorView& lengths) {
  Runtime runtime;
  runtime.executor = &executor_;
  runtime.workspace = {at<std::byte>(attention_), attention_bytes_};
  const BlockLists found =
      lists(TensorView(at<std::int32_t>(blocks_), DType::i32, {batch_, blocks(), heads(), most_entries()}),
            TensorView(at<std::int32_t>(counts_), DType::i32, {batch_, blocks(), heads()}));
  sparse_attention_forward(of_qkv(0), of_qkv(1), of_qkv(2), found,
                           TensorView(o, DType::f32, {batch_, length_, heads(), config_.dim_head}),
                           lse == nullptr ? TensorView() : TensorView(lse, DType::f32, {batch_, heads(), length_}),
                           attention_options(lengths), runtime);
}

// Both parts of a soft gate: a key of the rest weighs 1 - gate.
void AsamLayer::Call::join() {
  auto* rest_lse = at<float>(rest_lse_);
  parallel_for(executor_, batch_ * heads(), [&](std::int64_t index, int) {
    const std::int64_t b = index / heads(), h = index % heads();
    for (std::int64_t t = 0; t < length_; ++t) {
      const float logit = scores_.logits[score_at(b, t / config_.block_size) * heads() + h];
      // ln(1 - sigmoid(logit)), which is never -inf.
      rest_lse[index * length_ + t] -= std::max(logit, 0.0f) + std::log1p(std::exp(-std::abs(logit)));
    }
  });
  const auto rows = [&](std::size_t place) {
    return TensorView(at<float>(place), DType::f32, {batch_, length_, heads(), config_.dim_head});
  };
  const auto lse = [&](std::size_t place) {
    return TensorView(at<float>(place), DType::f32, {batch_, heads(), length_});
  };
  const std::array<Partial, 2> parts{Partial{rows(rows_), lse(lse_)}, Partial{rows(rest_), lse(rest_lse_)}};
  Runtime runtime;
  runtime.executor = &executor_;
  merge_attention(parts, rows(rows_), {}, {}, runtime);
}

// to_out and the feed-forward network, each added to the stream, while the rows are in cache.
void AsamLayer::Call::finish(const TensorView& y) {
  const std::int64_t dim = config_.dim;
  over_rows(executor_, total_, [&](std::int64_t first, std::int64_t rows, int worker) {
    float *stream = at<float>(x_) + first * dim, *sums = scratch<float>(worker, sums_);
    float *normed = scratch<float>(worker, normed_), *wide = scratch<float>(worker, wide_);
    auto* linear = scratch<void>(worker, linear_);
    weights_.out.run(at<float>(rows_) + first * weights_.inner(), sums, rows, linear);
    accumulate(sums, rows * dim, DType::f32, stream);
    norm_rows(weights_.ffn_norm, stream, rows, dim, normed);
    weights_.up.run(normed, wide, rows, linear);
    gelu(wide, rows * 4 * dim, DType::f32, wide);
    weights_.down.run(wide, sums, rows, linear);
    accumulate(sums, rows * dim, DType::f32, stream);
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t b = (first + i) / length_, t = (first + i) % length_;
      std::memcpy(static_cast<float*>(y.data) + b * y.stride[0] + t * y.stride[1], stream + i * dim,
                  sizeof(float) * static_cast<std::size_t>(dim));
    }
  });
}

// What was chosen; the lists are those of attended keys.
void AsamLayer::Call::tell(const AsamInfo& info, const AsamSelection& selection) const {
  const std::int64_t block = config_.block_size, H = heads(), rows = config_.causal ? length_ : 1;
  const auto to = [](const TensorView& view) { return static_cast<float*>(view.data); };
  for (std::int64_t b = 0; b < batch_; ++b) {
    for (std::int64_t h = 0; h < H; ++h) {
      const auto score = [&](const float* of, std::int64_t t) { return of[score_at(b, t / block) * H + h]; };
      if (info.gate_values.given()) {
        float* gate = to(info.gate_values) + (b * H + h) * length_;
        for (std::int64_t t = 0; t < length_; ++t) gate[t] = 1 / (1 + std::exp(-score(scores_.logits, t)));
      }
      if (info.confidence.given()) {
        float* confidence = to(info.confidence) + (b * H + h) * rows;
        for (std::int64_t t = 0; t < rows; ++t) confidence[t] = score(scores_.confidence, t);
      }
      if (info.patterns.given()) {
        auto* patterns = static_cast<std::int32_t*>(info.patterns.data) + (b * H + h) * prefixes();
        for (std::int64_t r = 0; r < prefixes(); ++r) {
          patterns[r] = at<std::int32_t>(choices_)[(b * prefixes() + r) * H + h];
        }
      }
    }
    if (info.pattern_logits.given()) {
      for (std::int64_t t = 0; t < rows; ++t) {
        std::copy_n(scores_.patterns + score_at(b, t / block) * kAsamChoices, kAsamChoices,
                    to(info.pattern_logits) + (b * rows + t) * kAsamChoices);
      }
    }
  }
  if (!info.sparse_ratio.given()) return;
  // Over all heads. Pairs are below 2^62 for each, and sums of so many of them need no more than double has.
  double attended = 0, all = 0;
  for (std::int64_t index = 0; index < batch_ * blocks(); ++index) {
    const std::int64_t b = index / blocks(), n = index % blocks();
    for (std::int64_t c = 0; c < selection.left(b, n); ++c) all += static_cast<double>(H * selection.pairs(b, n, c));
    for (std::int64_t h = 0; h < H; ++h) {
      const std::int32_t* list = at<std::int32_t>(blocks_) + (index * H + h) * most_entries();
      for (std::int32_t i = 0; i < at<std::int32_t>(counts_)[index * H + h]; ++i) {
        attended += static_cast<double>(selection.pairs(b, n, list[i]));
      }
    }
  }
  *to(info.sparse_ratio) = soft() ? 1.0f : static_cast<float>(attended / all);
}

}  // namespace heddle
