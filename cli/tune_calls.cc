#include "tune_calls.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "gpu.h"
#include "heddle/linear.h"
#include "heddle/lowbit.h"
#include "heddle/nsa.h"
#include "heddle/sparse.h"
#include "kit/device_mirror.h"
#include "tensors.h"

namespace heddle::cli {
namespace {

// Random numbers: how fast products run depends on the power that they draw, and so on their operands.
constexpr std::int64_t kBlock = 1 << 20;
HostTensor random_block(DType dtype) {
  HostTensor block(dtype == DType::f8e4m3 ? DType::bf16 : dtype, {kBlock});
  fill_normal(block.view(), 1);
  if (dtype == DType::f8e4m3) {  // any bytes but NaN's
    for (std::size_t n = 0; n < block.bytes(); ++n) block.data()[n] &= std::byte{0xBF};
  }
  return block;
}

// Tensors on the current GPU, and the time of calls there.
class Bench {
 public:
  TensorView random(std::initializer_list<std::int64_t> shape, DType dtype) {
    const TensorView view = empty(shape, dtype);
    const HostTensor block = random_block(dtype);
    const std::size_t bytes = static_cast<std::size_t>(view.elements()) * size_of(dtype);
    for (std::size_t at = 0; at < bytes; at += block.bytes()) {
      memory_.back().write(at, block.data(), std::min(block.bytes(), bytes - at));
    }
    return view;
  }
  TensorView empty(std::initializer_list<std::int64_t> shape, DType dtype) {
    TensorView view(nullptr, dtype, shape);
    memory_.emplace_back(static_cast<std::size_t>(view.elements()) * size_of(dtype));
    view.data = memory_.back().data();
    view.device = Device::cuda;
    return view;
  }
  TensorView copy(const void* data, std::initializer_list<std::int64_t> shape, DType dtype) {
    const TensorView view = empty(shape, dtype);
    memory_.back().write(0, data, static_cast<std::size_t>(view.elements()) * size_of(dtype));
    return view;
  }

  Runtime runtime(std::size_t workspace) { return gpu_.runtime(workspace); }
  void run(const std::function<void()>& launch) const { gpu_.seconds(launch); }

  // Of rounds of several milliseconds, after pauses in which the chip cools.
  double median(const std::function<void()>& launch) const {
    const GpuTimer timer(gpu_, launch);
    std::vector<double> times;
    for (int round = 0; round < 7; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      times.push_back(timer.round());
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  Gpu gpu_{"tune"};
  std::vector<kit::DeviceMemory> memory_;
};

// Weights of a packed layer, and where they lie.
PackedWeights weights_of(const LinearExample& call, Bench& bench) {
  if (call.order == WeightOrder::dense) return dense_weights(bench.random({call.N, call.K}, call.dtype));
  const HostTensor block = random_block(DType::bf16), weights(DType::bf16, {call.N, call.K});
  for (std::size_t at = 0; at < weights.bytes(); at += block.bytes()) {
    std::copy_n(block.data(), std::min(block.bytes(), weights.bytes() - at), weights.data() + at);
  }
  lowbit::QuantizedMatrix matrix = lowbit::storage(lowbit::format_named(call.format), call.N, call.K);
  std::vector<HostTensor> parts;
  for (TensorView* part : {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale}) {
    if (part->rank == 0) continue;
    parts.emplace_back(part->dtype, std::vector<std::int64_t>(part->shape.begin(), part->shape.begin() + part->rank));
    part->data = parts.back().data();
  }
  lowbit::quantize(weights.view(), {}, matrix);
  PackedWeights packed = packed_storage(matrix.format, call.N, call.K, /*gated=*/false, call.order);
  std::vector<std::byte> bytes(static_cast<std::size_t>(packed.data.shape[0]) + 64);
  void* data = bytes.data();
  std::size_t room = bytes.size();
  packed.data.data = std::align(64, bytes.size() - 64, data, room);
  pack_weights(matrix, packed);
  packed.data = bench.copy(packed.data.data, {packed.data.shape[0]}, DType::u8);
  packed.device = Device::cuda;
  return packed;
}

// Each entry of a list is drawn from a part of the blocks of its own.
BlockLists lists_of(const SparseExample& call, Bench& bench) {
  std::mt19937 random;
  const std::int64_t there = (call.S + call.block_size - 1) / call.block_size;
  std::vector<std::int32_t> entries;
  for (std::int64_t list = 0; list < call.B * call.lists() * call.Hkv; ++list) {
    for (std::int64_t n = 0; n < call.entries; ++n) {
      const std::int64_t begin = there * n / call.entries, end = there * (n + 1) / call.entries;
      entries.push_back(static_cast<std::int32_t>(begin + static_cast<std::int64_t>(random()) % (end - begin)));
    }
  }
  BlockLists lists;
  lists.blocks = bench.copy(entries.data(), {call.B, call.lists(), call.Hkv, call.entries}, DType::i32);
  lists.block_size = call.block_size;
  lists.query_rows = call.query_rows;
  return lists;
}

}  // namespace

PreparedCall prepared(const char* candidate, const AttentionExample& call, Pass pass) {
  struct Call {
    Bench bench = {};
    AttentionOptions options = {};
    TensorView q = {}, k = {}, v = {}, o = {}, lse = {}, d_o = {};
    AttentionGradients gradients = {};
  };
  const auto c = std::make_shared<Call>();
  c->options.force = candidate;
  c->options.precision = call.precision;
  const std::initializer_list<std::int64_t> rows = {call.B, call.Sq, call.H, call.D},
                                            keys = {call.B, call.Sk, call.Hkv, call.D};
  c->q = c->bench.random(rows, call.q);
  c->k = c->bench.random(keys, call.kv);
  c->v = c->bench.random(keys, call.kv);
  c->o = c->bench.empty(rows, call.q == DType::f8e4m3 ? DType::bf16 : call.q);
  const auto explain = [c, pass] {
    return pass == Pass::forward ? explain_attention(c->q, c->k, c->v, c->options)
                                 : explain_attention_backward(c->q, c->k, c->v, {}, c->options);
  };
  if (pass == Pass::forward) {
    return {explain, [c] {
              const Runtime runtime = c->bench.runtime(attention_forward_workspace(c->q, c->k, c->v, c->options));
              return c->bench.median([&] { attention_forward(c->q, c->k, c->v, c->o, {}, c->options, runtime); });
            }};
  }
  c->lse = c->bench.empty({call.B, call.H, call.Sq}, DType::f32);
  c->d_o = c->bench.random(rows, call.q);
  c->gradients.dq = c->bench.empty(rows, call.q);
  c->gradients.dk = c->bench.empty(keys, call.kv);
  c->gradients.dv = c->bench.empty(keys, call.kv);
  return {explain, [c] {
            // Of o and lse that a forward wrote, as the free choice has it.
            AttentionOptions free = c->options;
            free.force.clear();
            const Runtime before = c->bench.runtime(attention_forward_workspace(c->q, c->k, c->v, free));
            c->bench.run([&] { attention_forward(c->q, c->k, c->v, c->o, c->lse, free, before); });
            const Runtime runtime =
                c->bench.runtime(attention_backward_workspace(c->q, c->k, c->v, c->gradients, c->options));
            return c->bench.median([&] {
              attention_backward(c->q, c->k, c->v, c->o, c->lse, c->d_o, {}, c->gradients, c->options, runtime);
            });
          }};
}

PreparedCall prepared(const char* candidate, const SparseExample& call, Pass pass) {
  struct Call {
    Bench bench = {};
    AttentionOptions options = {};
    BlockLists lists = {};
    TensorView q = {}, k = {}, v = {}, o = {}, lse = {}, d_o = {};
    AttentionGradients gradients = {};
  };
  const auto c = std::make_shared<Call>();
  c->options.force = candidate;
  c->lists = lists_of(call, c->bench);
  c->q = c->bench.random({call.B, call.S, call.H, call.D}, call.dtype);
  c->k = c->bench.random({call.B, call.S, call.Hkv, call.D}, call.dtype);
  c->v = c->bench.random({call.B, call.S, call.Hkv, call.D}, call.dtype);
  c->o = c->bench.empty({call.B, call.S, call.H, call.D}, call.dtype);
  if (pass == Pass::backward) {
    c->lse = c->bench.empty({call.B, call.H, call.S}, DType::f32);
    c->d_o = c->bench.random({call.B, call.S, call.H, call.D}, call.dtype);
    c->gradients.dq = c->bench.empty({call.B, call.S, call.H, call.D}, call.dtype);
    c->gradients.dk = c->bench.empty({call.B, call.S, call.Hkv, call.D}, call.dtype);
    c->gradients.dv = c->bench.empty({call.B, call.S, call.Hkv, call.D}, call.dtype);
    return {[c] { return explain_sparse_attention_backward(c->q, c->k, c->v, c->lists, c->gradients, c->options); },
            [c] {
              AttentionOptions free = c->options;
              free.force.clear();
              const Runtime before =
                  c->bench.runtime(sparse_attention_forward_workspace(c->q, c->k, c->v, c->lists, free));
              c->bench.run([&] { sparse_attention_forward(c->q, c->k, c->v, c->lists, c->o, c->lse, free, before); });
              const Runtime runtime = c->bench.runtime(
                  sparse_attention_backward_workspace(c->q, c->k, c->v, c->lists, c->gradients, c->options));
              return c->bench.median([&] {
                sparse_attention_backward(c->q, c->k, c->v, c->lists, c->o, c->lse, c->d_o, {}, c->gradients,
                                          c->options, runtime);
              });
            }};
  }
  return {[c] { return explain_sparse_attention(c->q, c->k, c->v, c->lists, c->options); },
          [c] {
            const Runtime runtime =
                c->bench.runtime(sparse_attention_forward_workspace(c->q, c->k, c->v, c->lists, c->options));
            return c->bench.median(
                [&] { sparse_attention_forward(c->q, c->k, c->v, c->lists, c->o, {}, c->options, runtime); });
          }};
}

PreparedCall prepared(const char* candidate, const SelectExample& call, Pass) {
  struct Call {
    Bench bench = {};
    SelectOptions options = {};
    TensorView q = {}, k_pooled = {}, lse = {}, blocks = {};
  };
  const auto c = std::make_shared<Call>();
  c->options.force = candidate;
  c->options.block_size = call.block_size;
  c->q = c->bench.random({call.B, call.S, call.H, call.D}, call.dtype);
  c->k_pooled = c->bench.random({call.B, call.pooled(), call.Hkv, call.D}, call.dtype);
  c->lse = c->bench.random({call.B, call.H, call.S}, DType::f32);
  c->blocks = c->bench.empty({call.B, call.S, call.Hkv, call.slots}, DType::i32);
  return {[c] { return explain_select_blocks(c->q, c->k_pooled, c->lse, c->blocks, c->options); },
          [c] {
            const Runtime runtime =
                c->bench.runtime(select_blocks_workspace(c->q, c->k_pooled, c->lse, c->blocks, c->options));
            return c->bench.median([&] { select_blocks(c->q, c->k_pooled, c->lse, c->blocks, c->options, runtime); });
          }};
}

PreparedCall prepared(const char* candidate, const LinearExample& call, Pass pass) {
  struct Call {
    Bench bench = {};
    LinearOptions options = {};
    PackedWeights weights = {};
    TensorView x = {}, y = {};
    LinearGradients gradients = {};
  };
  const auto c = std::make_shared<Call>();
  c->options.force = candidate;
  c->options.int8_x = call.int8_x;
  c->weights = weights_of(call, c->bench);
  c->x = c->bench.random({call.M, call.K}, call.dtype);
  c->y = c->bench.random({call.M, call.N}, call.dtype);
  if (pass == Pass::forward) {
    return {[c] { return explain_linear(c->x, c->weights, c->options); },
            [c] {
              const Runtime runtime = c->bench.runtime(linear_forward_workspace(c->x, c->weights, c->options));
              return c->bench.median([&] { linear_forward(c->x, c->weights, c->y, c->options, runtime); });
            }};
  }
  c->gradients.dx = c->bench.empty({call.M, call.K}, call.dtype);
  return {[c] { return explain_linear_backward(c->y, c->x, c->weights, c->gradients, c->options); },
          [c] {
            const Runtime runtime =
                c->bench.runtime(linear_backward_workspace(c->y, c->x, c->weights, c->gradients, c->options));
            return c->bench.median([&] { linear_backward(c->y, c->x, c->weights, c->gradients, c->options, runtime); });
          }};
}

namespace {

constexpr std::int64_t kFewest = 16;

}  // namespace

AttentionExample small_of(AttentionExample call) {
  constexpr std::int64_t kFewKeys = 4096;
  call.B = 1;
  if (call.Sq == 1) {
    call.Sk = kFewKeys;
    return call;
  }
  call.H /= call.Hkv;
  call.Hkv = 1;
  call.Sq = call.Sk = kFewest;
  return call;
}

SparseExample small_of(SparseExample call) {
  call.B = 1;
  call.H /= call.Hkv;
  call.Hkv = 1;
  call.S = kFewest * call.query_rows;
  call.entries = 1;
  return call;
}

SelectExample small_of(SelectExample call) {
  call.S = 16 * call.block_size;
  return call;
}

LinearExample small_of(LinearExample call) {
  call.M = std::min<std::int64_t>(call.M, 16);
  call.N = call.K = 256;
  return call;
}

}  // namespace heddle::cli
