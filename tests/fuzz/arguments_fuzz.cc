// Calls the attention operations with arguments made from bytes: each call throws heddle::Error or runs clean under the
// sanitizers. A zero byte means "as it should be", so that most calls come close to passing the checks; other bytes
// bend ranks, shapes, strides, dtypes, options and index data.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "drawn_tensors.h"
#include "heddle/adaptive.h"
#include "heddle/attention.h"
#include "heddle/error.h"
#include "heddle/kv_cache.h"
#include "heddle/nsa.h"
#include "heddle/partial.h"
#include "heddle/sparse.h"

namespace {

using namespace heddle;
using fuzz::DrawnTensors;

class Call : DrawnTensors {
 public:
  Call(const std::uint8_t* data, std::size_t size) : DrawnTensors(data, size) {}

  void run() {
    const std::int64_t kind = bytes_.below(9);
    choose_sizes();
    try {
      switch (kind) {
        case 0:
          forward();
          break;
        case 1:
          backward();
          break;
        case 2:
          append();
          break;
        case 4:
          merge();
          break;
        case 5:
          pool();
          break;
        case 6:
          select();
          break;
        case 7:
          sparse();
          break;
        case 8:
          adaptive();
          break;
        default:
          rotary();
          break;
      }
    } catch (const Error&) {
    }
  }

 private:
  void choose_sizes() {
    dtype_ = std::array{DType::f32, DType::bf16, DType::f16}[bytes_.below(3)];
    B_ = 1 + bytes_.below(3);
    Hkv_ = 1 + bytes_.below(2);
    H_ = Hkv_ * (1 + bytes_.below(3));
    Sq_ = 1 + bytes_.below(9);
    Sk_ = 1 + bytes_.below(17);
    D_ = 1 + bytes_.below(20);
    Dv_ = bytes_.rarely(4) ? 1 + bytes_.below(20) : D_;
    if (bytes_.rarely(16)) Sq_ = 0;
    if (bytes_.rarely(16)) Sk_ = 0;
  }

  std::vector<std::int32_t> lengths(std::int64_t most) {
    std::vector<std::int32_t> out;
    for (std::int64_t b = 0; b < B_; ++b) out.push_back(static_cast<std::int32_t>(bytes_.below(most + 1)));
    return out;
  }
  std::vector<std::int32_t> offsets(std::int64_t total) {
    std::vector<std::int32_t> out = lengths(total);
    out.insert(out.begin(), 0);
    std::sort(out.begin(), out.end());
    out.back() = static_cast<std::int32_t>(total);
    return out;
  }

  // Leaves q, k, v and their options as one of: batched, packed, packed queries over a paged or batched cache.
  void tensors() {
    packed_q_ = bytes_.rarely(3);
    packed_k_ = packed_q_ && !bytes_.rarely(2);
    const bool paged = !packed_k_ && bytes_.rarely(3);
    const std::int64_t page = 1 + bytes_.below(5), pages = 4;
    q_shape_ = packed_q_ ? Shape{Sq_, H_, D_} : Shape{B_, Sq_, H_, D_};
    Shape k_shape = packed_k_ ? Shape{Sk_, Hkv_, D_} : Shape{paged ? pages : B_, paged ? page : Sk_, Hkv_, D_};
    q_ = view(q_shape_, dtype_);
    const bool narrow = dtype_ != DType::f32 && bytes_.rarely(8);
    const DType k_dtype = narrow ? DType::f8e4m3 : dtype_;
    k_ = view(k_shape, k_dtype);
    k_shape.back() = Dv_;
    v_ = view(k_shape, k_dtype);
    if (narrow) {
      k_shape.pop_back();
      if (bytes_.rarely(2)) k_shape[bytes_.below(k_shape.size())] = 1;
      options_.k_scale = view(k_shape, DType::f32);
      options_.v_scale = view(k_shape, DType::f32);
    }
    if (packed_q_) options_.cu_seqlens_q = indices(offsets(Sq_), {B_ + 1});
    if (packed_k_) options_.cu_seqlens_k = indices(offsets(Sk_), {B_ + 1});
    if (paged) {
      const std::int64_t columns = 1 + bytes_.below(3);
      std::vector<std::int32_t> table;
      for (std::int64_t i = 0; i < B_ * columns; ++i) table.push_back(static_cast<std::int32_t>(bytes_.below(pages)));
      options_.page_table = indices(table, {B_, columns});
      Sk_ = columns * page;
    }
    if (!packed_k_ && !paged && bytes_.rarely(8)) options_.cache_batch_idx = indices(lengths(B_ - 1), {B_});
    if (bytes_.rarely(8)) options_.cache_leftpad = indices(lengths(Sk_), {B_});
    if (bytes_.rarely(8)) options_.seqused_q = indices(lengths(packed_q_ ? 1 : Sq_), {B_});
    if (paged || bytes_.rarely(8)) options_.seqused_k = indices(lengths(packed_k_ ? 1 : Sk_), {B_});
    if (bytes_.rarely(8)) options_.max_seqlen_q = bytes_.below(12) - 1;
    if (bytes_.rarely(8)) options_.max_seqlen_k = bytes_.below(20) - 1;
  }

  void choose_options() {
    options_.causal = static_cast<Causal>(bytes_.below(3));
    if (bytes_.rarely(4)) options_.window_left = bytes_.below(10) - 2;
    if (bytes_.rarely(4)) options_.window_right = bytes_.rarely(8) ? INT64_MAX : bytes_.below(10) - 2;
    if (bytes_.rarely(4)) options_.softcap = static_cast<float>(bytes_.below(30) - 2);
    if (bytes_.rarely(8)) options_.scale = static_cast<float>(bytes_.below(20) - 4) / 4;
    if (bytes_.rarely(4)) options_.alibi_slopes = view(bytes_.rarely(2) ? Shape{B_, H_} : Shape{H_}, DType::f32);
    std::int64_t columns = Sk_;
    if (bytes_.rarely(4)) {  // a piece of a longer problem
      if (bytes_.rarely(2)) options_.q_offset = indices(lengths(9), {B_});
      if (bytes_.rarely(2)) options_.key_offset = indices(lengths(9), {B_});
      columns += 9 - bytes_.below(3);
      if (options_.causal == Causal::bottom_right && !bytes_.rarely(16)) options_.causal = Causal::top_left;
    }
    if (bytes_.rarely(8)) {  // rows and keys that stand for several positions
      static const std::int64_t absurd[] = {0, -1, INT64_MAX, INT64_MIN, INT32_MAX, std::int64_t{1} << 31};
      for (std::int64_t* step : {&options_.q_step, &options_.key_step}) {
        if (bytes_.rarely(2)) *step = bytes_.rarely(8) ? absurd[bytes_.below(6)] : 1 + bytes_.below(20);
      }
      if (options_.causal == Causal::bottom_right && !bytes_.rarely(16)) options_.causal = Causal::top_left;
    }
    options_.float32_out = bytes_.rarely(8);
    const auto extent = [&](std::int64_t full) { return bytes_.rarely(4) ? 1 : full; };
    if (bytes_.rarely(4)) {
      options_.bias =
          view({extent(B_), extent(H_), extent(Sq_), extent(columns)}, bytes_.rarely(2) ? DType::f32 : dtype_);
    }
    if (bytes_.rarely(4)) options_.mask = view({extent(B_), extent(H_), extent(Sq_), extent(columns)}, DType::boolean);
    if (bytes_.rarely(4)) options_.sink = view({H_}, DType::f32);
    if (bytes_.rarely(4)) options_.dropout = {static_cast<float>(bytes_.below(12)) / 10, bytes_.next(), bytes_.next()};
    if (bytes_.rarely(8)) options_.draft_mask = view({B_, Sq_}, DType::i32);
    if ((options_.q_step > 1 || options_.key_step > 1) && !bytes_.rarely(8)) {  // beside which these are refused
      options_.alibi_slopes = options_.bias = options_.mask = options_.draft_mask = {};
      options_.dropout = {};
    }
    options_.batch_invariant = bytes_.rarely(2);
    static const std::string methods[] = {"", "flash", "baseline", "other"};
    static const std::string names[] = {"", "cpu", "cpu_baseline", "reference", "other"};
    options_.method = methods[bytes_.below(4)];
    options_.force = bytes_.rarely(2) ? names[bytes_.below(5)] : "";
  }

  // Exactly the bytes asked for, or now and then one too few.
  Runtime runtime(std::size_t needed) {
    Runtime out;
    const std::size_t given = bytes_.rarely(32) && needed > 0 ? needed - 1 : needed;
    workspace_ = std::unique_ptr<void, void (*)(void*)>(std::aligned_alloc(64, (given + 63) / 64 * 64), std::free);
    out.workspace = {workspace_.get(), given};
    return out;
  }

  TensorView output_like_q(std::int64_t width) {
    Shape shape = q_shape_;
    shape.back() = width;
    return view(shape, options_.float32_out ? DType::f32 : dtype_, true);
  }
  TensorView row_values(bool output) {
    if (!output && bytes_.rarely(2)) return {};
    return view(packed_q_ ? Shape{H_, Sq_} : Shape{B_, H_, Sq_}, DType::f32, output);
  }

  void forward() {
    tensors();
    choose_options();
    const TensorView o = output_like_q(Dv_), lse = row_values(true);
    const Runtime with = runtime(attention_forward_workspace(q_, k_, v_, options_));
    attention_forward(q_, k_, v_, o, lse, options_, with);
    explain_attention(q_, k_, v_, options_);
  }

  AttentionGradients gradients_of_call() {
    AttentionGradients gradients;
    gradients.accumulate = bytes_.rarely(4);
    gradients.merged = bytes_.rarely(4);
    const bool wide = gradients.accumulate || bytes_.rarely(4);
    const auto like = [&](const TensorView& model, bool in_f32) {
      if (!model.given() || bytes_.rarely(4)) return TensorView{};
      return view(Shape(model.shape.begin(), model.shape.begin() + model.rank), in_f32 ? DType::f32 : model.dtype,
                  true);
    };
    gradients.dq = like(q_, wide);
    gradients.dk = like(k_, wide);
    gradients.dv = like(v_, wide);
    gradients.dbias = like(options_.bias, false);
    gradients.dsink = like(options_.sink, false);
    return gradients;
  }

  void backward() {
    tensors();
    choose_options();
    const TensorView o = output_like_q(Dv_), lse = row_values(true);
    attention_forward(q_, k_, v_, o, lse, options_, runtime(attention_forward_workspace(q_, k_, v_, options_)));
    const TensorView d_o = output_like_q(Dv_), d_lse = row_values(false);
    const AttentionGradients gradients = gradients_of_call();
    const Runtime with = runtime(attention_backward_workspace(q_, k_, v_, gradients, options_));
    attention_backward(q_, k_, v_, o, lse, d_o, d_lse, gradients, options_, with);
  }

  // Masks for lists, whose numbers may be anything.
  void masks(BlockLists& out) {
    const std::int64_t count = bytes_.below(4), words = (out.block_size + 31) / 32 + (bytes_.rarely(32) ? 1 : 0);
    std::vector<std::int32_t> bits(static_cast<std::size_t>(std::max<std::int64_t>(count * out.query_rows * words, 0)));
    for (std::int32_t& word : bits) word = static_cast<std::int32_t>(bytes_.next() * 0x01010101u);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(out.blocks.elements()));
    for (std::int32_t& id : ids) {
      id = static_cast<std::int32_t>(bytes_.below(6)) - 1;
      if (bytes_.rarely(16)) id = id < 0 ? INT32_MIN - id : INT32_MAX - id;
    }
    Shape shape(out.blocks.shape.begin(), out.blocks.shape.begin() + out.blocks.rank);
    if (bytes_.rarely(32)) shape[0] += 1, ids.resize(2 * ids.size() + 64);
    out.mask_ids = indices(ids, shape);
    if (!bytes_.rarely(32)) out.masks = indices(bits, {count, out.query_rows, std::max<std::int64_t>(words, 0)});
  }

  // Lists for the rows of q.
  BlockLists block_lists() {
    BlockLists out;
    out.block_size = std::array{16, 32, 64, 128}[bytes_.below(4)];
    if (bytes_.rarely(32)) out.block_size = bytes_.below(200) - 8;
    out.query_rows = 1 + bytes_.below(4);
    const std::int64_t heads = std::array{std::int64_t{1}, Hkv_, H_}[bytes_.below(3)], entries = bytes_.below(5);
    const std::int64_t rows = out.query_rows;
    const std::int64_t lists = !packed_q_ ? (Sq_ + rows - 1) / rows : rows == 1 ? Sq_ : Sq_ / rows + B_;
    const std::int64_t units = (packed_q_ ? 1 : B_) * heads;
    Shape shape = packed_q_ ? Shape{lists, heads} : Shape{B_, lists, heads};
    if (bytes_.rarely(8)) {  // lists one behind the other, each of its own length
      std::vector<std::int32_t> at{0}, offsets;
      for (std::int64_t unit = 0; unit < units; ++unit) {
        offsets.push_back(at.back());
        for (std::int64_t n = 0; n < lists; ++n) {
          at.push_back(at.back() + static_cast<std::int32_t>(bytes_.below(5)));
          offsets.push_back(at.back());
        }
      }
      out.blocks = indices(list_entries(at, Sk_), {at.back()});
      out.offsets = indices(offsets, packed_q_ ? Shape{heads, lists + 1} : Shape{B_, heads, lists + 1});
    } else {
      std::vector<std::int32_t> at{0}, counts;
      for (std::int64_t n = 0; n < units * lists; ++n) {
        at.push_back(at.back() + static_cast<std::int32_t>(entries));
        counts.push_back(static_cast<std::int32_t>(bytes_.below(entries + 1)));
      }
      if (bytes_.rarely(2)) out.counts = indices(counts, shape);
      shape.push_back(entries);
      out.blocks = indices(list_entries(at, Sk_), shape);
    }
    if (bytes_.rarely(4)) masks(out);
    if (bytes_.rarely(32)) out.query_rows = bytes_.below(9) - 2;
    return out;
  }

  void adaptive() {
    tensors();
    choose_options();
    if (!bytes_.rarely(16)) {  // what is not served
      options_.method.clear();
      options_.bias = options_.mask = options_.draft_mask = {};
      options_.dropout.p = 0;
    }
    const bool packed = options_.cu_seqlens_q.given();
    const std::int64_t rows = (packed ? q_.shape[0] : Sq_) * (H_ / Hkv_);
    Shape runs{Hkv_, packed ? rows / kAdaptiveRows + B_ : (rows + kAdaptiveRows - 1) / kAdaptiveRows,
               1 + bytes_.below(2)};
    if (!packed) runs.insert(runs.begin(), B_);
    const TensorView o = output_like_q(Dv_), lse = row_values(true), bound = row_values(true);
    const TensorView replaced = view(runs, DType::u8, true);
    const AdaptiveOptions tolerance{.tol = static_cast<float>(bytes_.below(100)) / 50};
    adaptive_attention_forward(q_, k_, v_, {o, lse, bound, replaced}, tolerance, options_,
                               runtime(adaptive_attention_forward_workspace(q_, k_, v_, tolerance, options_)));
    explain_adaptive_attention(q_, k_, v_, tolerance, options_);
    if (!bytes_.rarely(2)) return;
    const TensorView d_o = output_like_q(Dv_), d_lse = row_values(false);
    const AttentionGradients gradients = gradients_of_call();
    const Runtime with = runtime(adaptive_attention_backward_workspace(q_, k_, v_, replaced, gradients, options_));
    adaptive_attention_backward(q_, k_, v_, replaced, o, lse, d_o, d_lse, gradients, options_, with);
  }

  void sparse() {
    tensors();
    choose_options();
    if (!bytes_.rarely(16)) options_.method.clear();  // no method is served
    const bool backward = bytes_.rarely(2);
    const BlockLists lists = block_lists();
    const TensorView o = output_like_q(Dv_), lse = row_values(true);
    sparse_attention_forward(q_, k_, v_, lists, o, lse, options_,
                             runtime(sparse_attention_forward_workspace(q_, k_, v_, lists, options_)));
    explain_sparse_attention(q_, k_, v_, lists, options_);
    if (!backward) return;
    const TensorView d_o = output_like_q(Dv_), d_lse = row_values(false);
    const AttentionGradients gradients = gradients_of_call();
    const Runtime with = runtime(sparse_attention_backward_workspace(q_, k_, v_, lists, gradients, options_));
    sparse_attention_backward(q_, k_, v_, lists, o, lse, d_o, d_lse, gradients, options_, with);
    explain_sparse_attention_backward(q_, k_, v_, lists, gradients, options_);
  }

  void merge() {
    const bool packed = bytes_.rarely(2), wide = bytes_.rarely(2), backward = bytes_.rarely(2);
    const std::int64_t count = bytes_.rarely(16) ? 0 : 1 + bytes_.below(3);
    const auto rows = [&](DType dtype, bool output) {
      return view(packed ? Shape{Sq_, H_, Dv_} : Shape{B_, Sq_, H_, Dv_}, dtype, output);
    };
    const auto per_row = [&](bool output) {
      return view(packed ? Shape{H_, Sq_} : Shape{B_, H_, Sq_}, DType::f32, output);
    };
    std::vector<Partial> partials, gradients;
    for (std::int64_t n = 0; n < count; ++n) {
      partials.push_back({rows(dtype_, false), per_row(false)});
      if (backward) gradients.push_back({rows(dtype_, true), per_row(true)});
    }
    const TensorView sink = bytes_.rarely(2) ? view({H_}, DType::f32) : TensorView{};
    const TensorView o = rows(wide ? DType::f32 : dtype_, !backward), lse = per_row(!backward);
    if (backward) {
      merge_attention_backward(partials, o, lse, gradients, sink.given() ? view({H_}, DType::f32, true) : sink,
                               {.sink = sink});
    } else {
      merge_attention(partials, o, lse, {.sink = sink});
    }
  }

  static constexpr std::int64_t kPages = 4;
  // [B, columns], now and then with a page that is not there.
  TensorView pages_of(std::int64_t columns) {
    std::vector<std::int32_t> table;
    for (std::int64_t i = 0; i < B_ * columns; ++i) table.push_back(static_cast<std::int32_t>(bytes_.below(kPages)));
    if (!table.empty() && bytes_.rarely(8)) table[bytes_.below(table.size())] = bytes_.rarely(2) ? INT32_MAX : -1;
    return indices(table, {B_, columns});
  }

  void pool() {
    const bool packed = bytes_.rarely(2), backward = bytes_.rarely(2);
    PoolOptions options;
    options.stride = 1 + bytes_.below(4);
    options.block = options.stride + bytes_.below(4);
    if (bytes_.rarely(32)) options.stride = bytes_.below(3) - 1;
    if (bytes_.rarely(32)) options.block = bytes_.rarely(2) ? INT64_MAX : bytes_.below(3) - 1;
    if (packed) options.cu_seqlens = indices(offsets(Sk_), {B_ + 1});
    if (bytes_.rarely(4)) options.seqused = indices(lengths(packed ? 1 : Sk_), {B_});
    const std::int64_t stride = std::max<std::int64_t>(options.stride, 1);
    const std::int64_t rows = packed ? Sk_ / stride : Sk_ < options.block ? 0 : (Sk_ - options.block) / stride + 1;
    const auto tensor = [&](std::int64_t count, bool output) {
      return view(packed ? Shape{count, Hkv_, D_} : Shape{B_, count, Hkv_, D_}, dtype_, output);
    };
    const TensorView x = tensor(Sk_, backward), pooled = tensor(rows, !backward);
    static const std::string names[] = {"", "cpu", "reference", "other"};
    options.force = names[bytes_.below(4)];
    if (!backward && bytes_.rarely(3)) {
      options.appended = bytes_.rarely(16) ? INT64_MAX : static_cast<std::int64_t>(bytes_.below(8));
      if (packed || bytes_.rarely(2)) {
        extend_pooled_keys(x, pooled, options);
        return;
      }
      const std::int64_t size = stride * (1 + bytes_.below(3)), columns = bytes_.below(4);
      options.page_table = pages_of(columns);
      options.seqused = indices(lengths(columns * size), {B_});
      const auto in_pages = [&](std::int64_t count, bool output) {
        return view(Shape{kPages, count, Hkv_, D_}, dtype_, output);
      };
      extend_pooled_keys(in_pages(size, false), in_pages(size / stride, true), options);
    } else if (backward) {
      pool_keys_backward(pooled, x, options);
      explain_pool_keys_backward(pooled, x, options);
    } else {
      pool_keys(x, pooled, options);
      explain_pool_keys(x, pooled, options);
    }
  }

  void select() {
    packed_q_ = bytes_.rarely(3);
    packed_k_ = packed_q_ && !bytes_.rarely(2);
    const TensorView q = view(packed_q_ ? Shape{Sq_, H_, D_} : Shape{B_, Sq_, H_, D_}, dtype_);
    SelectOptions options;
    Shape k_shape = packed_k_ ? Shape{Sk_, Hkv_, D_} : Shape{B_, Sk_, Hkv_, D_};
    if (!packed_k_ && bytes_.rarely(3)) {
      const std::int64_t size = 1 + bytes_.below(5), columns = bytes_.below(4);
      options.page_table = pages_of(columns);
      k_shape = {kPages, size, Hkv_, D_};
      Sk_ = columns * size;
    }
    const TensorView k = view(k_shape, dtype_);
    const TensorView lse = row_values(false);
    const std::int64_t slots = bytes_.below(9);
    const TensorView blocks = view(packed_q_ ? Shape{Sq_, Hkv_, slots} : Shape{B_, Sq_, Hkv_, slots}, DType::i32, true);
    options.block_size = 16 << bytes_.below(4);
    if (bytes_.rarely(2)) options.compression_stride = 1 << bytes_.below(6);
    if (bytes_.rarely(2)) options.compression_block = (1 + bytes_.below(9)) << bytes_.below(6);
    if (bytes_.rarely(32)) options.compression_block = bytes_.rarely(2) ? INT64_MAX : bytes_.next() - 9;
    if (bytes_.rarely(32)) options.compression_stride = bytes_.rarely(2) ? INT64_MIN : bytes_.next() - 9;
    if (bytes_.rarely(32)) options.block_size = bytes_.next() - 9;
    options.forced = {.first = !bytes_.rarely(2), .previous = !bytes_.rarely(2), .current = !bytes_.rarely(2)};
    if (bytes_.rarely(2)) options.q_offset = indices(lengths(255), {B_});
    if (bytes_.rarely(2)) options.q_step = 1 + bytes_.below(200);
    if (bytes_.rarely(32)) options.q_step = bytes_.rarely(2) ? INT64_MAX : bytes_.below(3) - 1;
    if (bytes_.rarely(8)) options.scale = static_cast<float>(bytes_.below(20) - 4) / 4;
    if (packed_q_) options.cu_seqlens_q = indices(offsets(Sq_), {B_ + 1});
    if (packed_k_) options.cu_seqlens_k = indices(offsets(Sk_), {B_ + 1});
    if (bytes_.rarely(4)) options.seqused_k = indices(lengths(packed_k_ ? 1 : Sk_), {B_});
    if (bytes_.rarely(8)) options.max_seqlen_q = bytes_.below(12) - 1;
    if (bytes_.rarely(8)) options.max_seqlen_k = bytes_.below(20) - 1;
    static const std::string names[] = {"", "cpu", "reference", "other"};
    options.force = names[bytes_.below(4)];
    const Runtime with = runtime(select_blocks_workspace(q, k, lse, blocks, options));
    select_blocks(q, k, lse, blocks, options, with);
    explain_select_blocks(q, k, lse, blocks, options);
  }

  void append() {
    const bool paged = bytes_.rarely(2);
    const std::int64_t page = 1 + bytes_.below(5), pages = 6, columns = 1 + bytes_.below(4);
    const std::int64_t rows = 1 + bytes_.below(4);
    const auto cache = [&](std::int64_t width) {
      return view(paged ? Shape{pages, page, Hkv_, width} : Shape{B_, Sk_, Hkv_, width}, dtype_);
    };
    const TensorView k_new = view({B_, rows, Hkv_, D_}, dtype_), v_new = view({B_, rows, Hkv_, Dv_}, dtype_);
    const TensorView k_cache = cache(D_), v_cache = cache(Dv_);
    const std::int64_t slots = paged ? page * columns : Sk_;
    const TensorView seqlens = indices(lengths(std::max<std::int64_t>(slots - rows, 0)), {B_});
    TensorView table, batch;
    if (paged) {
      std::vector<std::int32_t> values;
      for (std::int64_t i = 0; i < B_ * columns; ++i) values.push_back(static_cast<std::int32_t>(bytes_.below(pages)));
      table = indices(values, {B_, columns});
    } else if (bytes_.rarely(4)) {
      batch = indices(lengths(B_ - 1), {B_});
    }
    const Rotary rotary = bytes_.rarely(2) ? make_rotary(slots + 1) : Rotary{};
    append_kv_cache(k_new, v_new, k_cache, v_cache, seqlens,
                    {.rotary = rotary, .page_table = table, .cache_batch_idx = batch});
  }

  void rotary() {
    const TensorView x = view({B_, Sq_, H_, D_}, dtype_);
    const TensorView out = bytes_.rarely(2) ? x : view({B_, Sq_, H_, D_}, dtype_, true);
    const TensorView positions = bytes_.rarely(2) ? indices(lengths(9), {B_}) : TensorView{};
    apply_rotary(x, out, make_rotary(Sq_ + 9), {.offsets = positions});
  }

  Rotary make_rotary(std::int64_t positions) {
    const std::int64_t half = bytes_.rarely(4) ? 1 + bytes_.below(12) : std::max<std::int64_t>(D_ / 2, 1);
    const DType dtype = bytes_.rarely(2) ? dtype_ : DType::f32;
    Rotary out;
    out.cos = view({positions, half}, dtype);
    out.sin = view({positions, half}, dtype);
    out.interleaved = bytes_.rarely(2);
    return out;
  }

  std::unique_ptr<void, void (*)(void*)> workspace_{nullptr, std::free};
  DType dtype_ = DType::f32;
  std::int64_t B_ = 1, H_ = 1, Hkv_ = 1, Sq_ = 1, Sk_ = 1, D_ = 1, Dv_ = 1;
  bool packed_q_ = false, packed_k_ = false;
  Shape q_shape_;
  TensorView q_, k_, v_;
  AttentionOptions options_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Call(data, size).run();
  return 0;
}
