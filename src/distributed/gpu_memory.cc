#include "distributed/gpu_memory.h"

#include <optional>

#include "cuda/rank_memory.h"

namespace heddle::distributed {
namespace {

std::int64_t count_of(std::span<const float> x) { return static_cast<std::int64_t>(x.size()); }

class GpuMemory : public Memory {
 public:
  Device device() const override { return Device::cuda; }
  void use_stream(void* stream) override { stream_ = stream; }
  void end_of_call() noexcept override {
    if (kept_) kept_->end_of_call(stream_);
  }

  void* replace(void* old, std::size_t bytes) override {
    if (!kept_) {
      cuda::refuse_capture(bytes, stream_);
      kept_.emplace();
    }
    return kept_->replace(old, bytes, stream_);
  }
  void give_back(void* data) noexcept override { kept_->give_back(data); }

  void write(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) cuda::write_to_gpu(to, from, bytes, stream_);
  }
  void read(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) cuda::read_from_gpu(to, from, bytes, stream_);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) cuda::copy_on_gpu(to, from, bytes, stream_);
  }
  void fill(std::span<float> x, float value) override { cuda::fill_floats(x.data(), count_of(x), value, stream_); }
  void add(std::span<float> sum, std::span<const float> x) override {
    cuda::add_floats(sum.data(), x.data(), count_of(x), stream_);
  }
  using Memory::copy_rows;
  void copy_rows(const TensorView& from, const TensorView& to, std::span<const RowMove> moves) override {
    cuda::move_rows(from, to, moves, false, stream_);
  }
  void add_rows(const TensorView& from, const TensorView& to, std::span<const RowMove> moves) override {
    cuda::move_rows(from, to, moves, true, stream_);
  }

 private:
  std::optional<cuda::KeptMemory> kept_;  // from the first replace() on: who only copies needs none
  void* stream_ = nullptr;
};

}  // namespace

std::unique_ptr<Memory> gpu_memory() { return std::make_unique<GpuMemory>(); }

}  // namespace heddle::distributed
