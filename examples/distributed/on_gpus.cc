#include "on_gpus.h"

#include <cuda_runtime_api.h>
#include <heddle/attention.h>
#include <heddle/error.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace {

using heddle::DType, heddle::TensorView;
using namespace heddle::distributed;
using std::int64_t;

constexpr int64_t kHeads = 16, kKvHeads = 4, kHeadSize = 128;
constexpr int64_t kRow = kHeads * kHeadSize, kKeyRow = kKvHeads * kHeadSize;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw heddle::RuntimeError(cudaGetErrorString(status));
}

// Memory of the current GPU.
class OnGpu {
 public:
  explicit OnGpu(std::size_t bytes) { check(cudaMalloc(&data_, std::max<std::size_t>(bytes, 1))); }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  ~OnGpu() { cudaFree(data_); }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

TensorView on_gpu(const OnGpu& memory, DType dtype, std::initializer_list<int64_t> shape) {
  TensorView out(memory.data(), dtype, shape);
  out.device = heddle::Device::cuda;
  return out;
}

// bfloat16 is the upper half of a float.
using Numbers = std::vector<std::uint16_t>;
float widened(std::uint16_t x) {
  const std::uint32_t bits = std::uint32_t{x} << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Values of `width` numbers a row, the same on every rank.
Numbers drawn(unsigned seed, int64_t rows, int64_t width) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Numbers x(static_cast<std::size_t>(rows * width));
  for (std::uint16_t& value : x) {
    const float number = normal(random);
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    value = static_cast<std::uint16_t>(bits >> 16);
  }
  return x;
}

Numbers rows_of(const Numbers& x, const std::vector<int64_t>& rows, int64_t width) {
  Numbers out;
  for (const int64_t row : rows) out.insert(out.end(), x.begin() + row * width, x.begin() + (row + 1) * width);
  return out;
}

// Everything of some rows that a call reads and writes.
struct Tensors {
  int64_t rows;
  OnGpu q, k, v, d_o, o, lse, dq, dk, dv;

  Tensors(const Numbers& q, const Numbers& k, const Numbers& v, const Numbers& d_o)
      : rows(std::ssize(q) / kRow),
        q(2 * q.size()),
        k(2 * k.size()),
        v(2 * v.size()),
        d_o(2 * q.size()),
        o(2 * q.size()),
        lse(sizeof(float) * static_cast<std::size_t>(rows * kHeads)),
        dq(2 * q.size()),
        dk(2 * k.size()),
        dv(2 * v.size()) {
    const auto put = [](const OnGpu& to, const Numbers& from) {
      check(cudaMemcpy(to.data(), from.data(), 2 * from.size(), cudaMemcpyHostToDevice));
    };
    put(this->q, q), put(this->k, k), put(this->v, v), put(this->d_o, d_o);
    check(cudaStreamSynchronize(nullptr));
  }
  TensorView view(const OnGpu& memory, int64_t heads) const {
    return on_gpu(memory, DType::bf16, {1, rows, heads, kHeadSize});
  }
  TensorView lse_view() const { return on_gpu(lse, DType::f32, {1, kHeads, rows}); }
};

Numbers read(const OnGpu& from, int64_t count) {
  Numbers out(static_cast<std::size_t>(count));
  check(cudaMemcpy(out.data(), from.data(), 2 * out.size(), cudaMemcpyDeviceToHost));
  return out;
}

void on_one_gpu(const Tensors& t, cudaStream_t stream) {
  heddle::AttentionOptions options;
  options.causal = heddle::Causal::top_left;
  const heddle::AttentionGradients gradients{
      .dq = t.view(t.dq, kHeads), .dk = t.view(t.dk, kKvHeads), .dv = t.view(t.dv, kKvHeads), .dbias = {}, .dsink = {}};
  const TensorView q = t.view(t.q, kHeads), k = t.view(t.k, kKvHeads), v = t.view(t.v, kKvHeads),
                   o = t.view(t.o, kHeads);
  const std::size_t bytes = std::max(heddle::attention_forward_workspace(q, k, v, options),
                                     heddle::attention_backward_workspace(q, k, v, gradients, options));
  const OnGpu workspace(bytes);
  heddle::Runtime runtime;
  runtime.stream = stream;
  runtime.workspace = {workspace.data(), bytes};
  heddle::attention_forward(q, k, v, o, t.lse_view(), options, runtime);
  heddle::attention_backward(q, k, v, o, t.lse_view(), t.view(t.d_o, kHeads), {}, gradients, options, runtime);
  check(cudaStreamSynchronize(stream));
}

// The largest difference of a rank's rows from the whole's, over the largest of these.
double farthest(const Numbers& found, const Numbers& whole, const std::vector<int64_t>& rows, int64_t width) {
  const Numbers right = rows_of(whole, rows, width);
  double most = 0, largest = 0;
  for (std::size_t n = 0; n < right.size(); ++n) {
    const double off = std::abs(widened(found[n]) - widened(right[n]));
    most = std::isnan(off) ? off : std::max(most, off);
    largest = std::max<double>(largest, std::abs(widened(right[n])));
  }
  return most / std::max(largest, 1e-30);
}

// Milliseconds of a call on the stream, the mean of ten.
double timed(cudaStream_t stream, const std::function<void()>& call) {
  constexpr int kCalls = 10;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  call();
  check(cudaEventRecord(begin, stream));
  for (int n = 0; n < kCalls; ++n) call();
  check(cudaEventRecord(end, stream));
  check(cudaEventSynchronize(end));
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end));
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return milliseconds / kCalls;
}

}  // namespace

void use_gpu(int n) {
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus));
  check(cudaSetDevice(n % std::max(gpus, 1)));
}

void attend_on_gpus(Communicator& communicator, int64_t rows, Scheme scheme) {
  const Plan plan({.rows = rows,
                   .ranks = communicator.size(),
                   .heads = kHeads,
                   .kv_heads = kKvHeads,
                   .head_size = kHeadSize,
                   .head_size_v = kHeadSize,
                   .causal = heddle::Causal::top_left});
  // A program that is in earnest never has the whole: each rank reads its own rows.
  const Numbers q = drawn(1, rows, kRow), k = drawn(2, rows, kKeyRow), v = drawn(3, rows, kKeyRow),
                d_o = drawn(4, rows, kRow);
  std::vector<int64_t> own;
  for (const Run& part : plan.runs(communicator.rank())) {
    for (int64_t n = 0; n < part.count; ++n) own.push_back(part.begin + part.step * n);
  }
  const Tensors mine(rows_of(q, own, kRow), rows_of(k, own, kKeyRow), rows_of(v, own, kKeyRow),
                     rows_of(d_o, own, kRow));
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  heddle::Runtime runtime;
  runtime.stream = stream;
  RankAttention attention(plan, communicator, scheme);
  const TensorView o = mine.view(mine.o, kHeads);
  const auto forward = [&] {
    attention.forward(mine.view(mine.q, kHeads), mine.view(mine.k, kKvHeads), mine.view(mine.v, kKvHeads), o,
                      mine.lse_view(), {}, runtime);
  };
  const auto backward = [&] {
    attention.backward(mine.view(mine.q, kHeads), mine.view(mine.k, kKvHeads), mine.view(mine.v, kKvHeads), o,
                       mine.lse_view(), mine.view(mine.d_o, kHeads), {},
                       {.dq = mine.view(mine.dq, kHeads),
                        .dk = mine.view(mine.dk, kKvHeads),
                        .dv = mine.view(mine.dv, kKvHeads),
                        .dsink = {}},
                       {}, runtime);
  };
  const double forward_ms = timed(stream, forward), backward_ms = timed(stream, backward);
  check(cudaStreamSynchronize(stream));

  const Tensors whole(q, k, v, d_o);
  on_one_gpu(whole, stream);
  const auto off = [&](const OnGpu& found, const OnGpu& right, int64_t width) {
    return farthest(read(found, std::ssize(own) * width), read(right, rows * width), own, width);
  };
  const double each[] = {off(mine.o, whole.o, kRow), off(mine.dq, whole.dq, kRow), off(mine.dk, whole.dk, kKeyRow),
                         off(mine.dv, whole.dv, kKeyRow)};
  for (const double one : each) {
    // Both are rounded to 8 bits, and so are products inside.
    if (!(one < 0x1p-5)) throw heddle::RuntimeError("off by " + std::to_string(one) + " of the largest from one GPU");
  }
  communicator.barrier();
  std::printf(
      "rank %d of %d, %s: forward %.3f ms, backward %.3f ms of %lld rows; %.1e of the largest the farthest from one "
      "GPU\n",
      communicator.rank(), communicator.size(), name_of(attention.scheme()), forward_ms, backward_ms,
      static_cast<long long>(rows), *std::max_element(std::begin(each), std::end(each)));
  cudaStreamDestroy(stream);
}
