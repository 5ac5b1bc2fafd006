// Exchanges by NCCL's sends and receives on a stream of their own, ordered with the caller's by events.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "heddle/distributed_nccl.h"

namespace heddle::distributed {
namespace {

using Clock = std::chrono::steady_clock;

static_assert(sizeof(NcclId) == sizeof(ncclUniqueId));

void check_cuda(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // not left for the next call to trip over
  throw RuntimeError(text("[distributed] ", what, ": CUDA: ", cudaGetErrorString(status)));
}

void check_nccl(ncclResult_t result, const std::string& what) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  throw RuntimeError(text("[distributed] ", what, ": NCCL: ", ncclGetErrorString(result)));
}

int current_gpu() {
  int gpu = 0;
  check_cuda(cudaGetDevice(&gpu), "communicator");
  return gpu;
}

// Asks until there is an answer or time is over.
class Patience {
 public:
  explicit Patience(const std::optional<std::chrono::milliseconds>& timeout) {
    if (timeout) end_ = Clock::now() + *timeout;
  }
  bool over() const { return end_ && Clock::now() > *end_; }
  void pause() {
    if (++tries_ < kBusyTries) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

 private:
  static constexpr int kBusyTries = 1000;
  std::optional<Clock::time_point> end_;
  int tries_ = 0;
};

// Events of exchanges, used again. One that was waited for may be: a wait is for what was recorded before it.
class Events {
 public:
  Events() = default;
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  ~Events() {
    for (const cudaEvent_t event : free_) cudaEventDestroy(event);
  }
  cudaEvent_t take() {
    cudaEvent_t event = nullptr;
    if (free_.empty()) {
      check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
    } else {
      event = free_.back();
      free_.pop_back();
    }
    return event;
  }
  void give_back(cudaEvent_t event) { free_.push_back(event); }

 private:
  std::vector<cudaEvent_t> free_;
};

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(const NcclId& id, int size, int rank, const NcclOptions& options)
      : NcclCommunicator(options, size, rank, true) {
    ncclUniqueId unique;
    std::memcpy(&unique, id.bytes.data(), sizeof unique);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    // Without a timeout nobody would look at what goes on in the background, and each exchange would start a thread.
    config.blocking = options.timeout ? 0 : 1;
    if (options.multiprocessors > 0) config.maxCTAs = options.multiprocessors;
    const std::string what = "communicator made";
    const ncclResult_t result = ncclCommInitRankConfig(&comm_, size, unique, rank, &config);
    if (result != ncclSuccess && result != ncclInProgress) comm_ = nullptr;
    check_nccl(result, what);
    settle(what, "waits for the other ranks");
  }
  NcclCommunicator(ncclComm_t comm, int size, int rank, const NcclOptions& options)
      : NcclCommunicator(options, size, rank, false) {
    comm_ = comm;
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  ~NcclCommunicator() override {
    // What is on its way may never be done where a rank is lost; a timeout says how long that is believed in.
    if (comm_ != nullptr && owned_) {
      if (!timeout_ || (done_in_time() && finalized_in_time())) {
        ncclCommDestroy(comm_);
      } else {
        ncclCommAbort(comm_);
      }
    }
    cudaEventDestroy(before_);
    cudaStreamDestroy(own_stream_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return "NCCL"; }
  Device device() const override { return Device::cuda; }
  void use_stream(void* stream) override { stream_ = static_cast<cudaStream_t>(stream); }
  void* stream() const override { return stream_; }
  std::unique_ptr<Transfer> exchange(std::span<const std::byte> out, int to, std::span<std::byte> in, int from,
                                     const std::string& what) override;

 private:
  friend class NcclTransfer;

  NcclCommunicator(const NcclOptions& options, int size, int rank, bool owned)
      : timeout_(options.timeout), size_(size), rank_(rank), owned_(owned), gpu_(current_gpu()) {
    // Of the highest priority: an exchange takes the first multiprocessors that products leave.
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "communicator");
    check_cuda(cudaStreamCreateWithPriority(&own_stream_, cudaStreamNonBlocking, greatest), "communicator");
    check_cuda(cudaEventCreateWithFlags(&before_, cudaEventDisableTiming), "communicator");
  }

  void require_usable(const std::string& what) const;
  // Until NCCL has taken what it was given. waits: what this rank does meanwhile, for the error.
  void settle(const std::string& what, const std::string& waits);
  // Until the event is there. Throws as settle() does.
  void wait_on_host(cudaEvent_t event, const std::string& what, const std::string& waits);
  [[noreturn]] void fail(const std::string& what, const std::string& waits, const std::string& why);
  void require_no_error(const std::string& what, const std::string& waits, ncclResult_t state) {
    if (state == ncclSuccess || state == ncclInProgress) return;
    const char* const said = ncclGetLastError(comm_);
    fail(what, waits,
         text("and NCCL says: ", ncclGetErrorString(state), said != nullptr ? ", " : "", said != nullptr ? said : ""));
  }
  std::string in_vain() const { return text("in vain for ", timeout_->count(), " ms"); }
  bool done_in_time() const {
    Patience patience(timeout_);
    while (cudaStreamQuery(own_stream_) == cudaErrorNotReady) {
      if (patience.over()) return false;
      patience.pause();
    }
    return true;
  }
  // Of a communicator that does not block.
  bool finalized_in_time() const {
    const ncclResult_t begun = ncclCommFinalize(comm_);
    if (begun != ncclSuccess && begun != ncclInProgress) return false;
    Patience patience(timeout_);
    ncclResult_t state = ncclInProgress;
    while (ncclCommGetAsyncError(comm_, &state) == ncclSuccess && state == ncclInProgress && !patience.over()) {
      patience.pause();
    }
    return state == ncclSuccess;
  }

  const std::optional<std::chrono::milliseconds> timeout_;
  const int size_, rank_;
  const bool owned_;
  const int gpu_;
  ncclComm_t comm_ = nullptr;  // null: aborted
  cudaStream_t own_stream_ = nullptr, stream_ = nullptr;
  cudaEvent_t before_ = nullptr;  // what the caller's stream has before an exchange
  Events events_;
};

// Of an exchange that has nothing to send and nothing to receive.
class NoTransfer : public Transfer {
 public:
  void wait() override {}
};

class NcclTransfer : public Transfer {
 public:
  NcclTransfer(NcclCommunicator& of, cudaEvent_t done, std::string what, std::string waits)
      : of_(of), done_(done), what_(std::move(what)), waits_(std::move(waits)) {}
  NcclTransfer(const NcclTransfer&) = delete;
  NcclTransfer& operator=(const NcclTransfer&) = delete;
  ~NcclTransfer() override { of_.events_.give_back(done_); }

  void wait() override {
    if (waited_) return;
    if (of_.timeout_) of_.wait_on_host(done_, what_, waits_);
    check_cuda(cudaStreamWaitEvent(of_.stream_, done_, 0), what_);
    waited_ = true;
  }

 private:
  NcclCommunicator& of_;
  const cudaEvent_t done_;
  const std::string what_, waits_;
  bool waited_ = false;
};

void NcclCommunicator::require_usable(const std::string& what) const {
  if (comm_ == nullptr) {
    throw RuntimeError(text("[distributed] ", what, ": rank ", rank_, "'s communicator was aborted after an error"));
  }
  const int gpu = current_gpu();
  if (gpu != gpu_) {
    throw Error(text("[distributed] ", what, ": the current GPU is ", gpu, ": it must be the communicator's, ", gpu_));
  }
  if (!timeout_) return;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream_, &status), what);
  if (status != cudaStreamCaptureStatusNone) {
    throw Error(text("[distributed] ", what,
                     ": the stream is captured and the communicator has a timeout: the host would wait for what does "
                     "not run yet"));
  }
}

std::unique_ptr<Transfer> NcclCommunicator::exchange(std::span<const std::byte> out, int to, std::span<std::byte> in,
                                                     int from, const std::string& what) {
  if (out.empty() && in.empty()) return std::make_unique<NoTransfer>();
  require_usable(what);
  const std::string waits = in.empty() ? text("sends to rank ", to) : text("waits for rank ", from);
  check_cuda(cudaEventRecord(before_, stream_), what);
  check_cuda(cudaStreamWaitEvent(own_stream_, before_, 0), what);
  // In one group, so that neither waits for the other. A group that was begun is ended.
  ncclResult_t results[] = {ncclGroupStart(), ncclSuccess, ncclSuccess, ncclSuccess};
  require_no_error(what, waits, results[0]);
  if (!out.empty()) results[1] = ncclSend(out.data(), out.size(), ncclUint8, to, comm_, own_stream_);
  if (!in.empty()) results[2] = ncclRecv(in.data(), in.size(), ncclUint8, from, comm_, own_stream_);
  results[3] = ncclGroupEnd();
  for (const ncclResult_t result : results) require_no_error(what, waits, result);
  settle(what, waits);
  const cudaEvent_t done = events_.take();
  const cudaError_t recorded = cudaEventRecord(done, own_stream_);
  if (recorded != cudaSuccess) events_.give_back(done);
  check_cuda(recorded, what);
  return std::make_unique<NcclTransfer>(*this, done, what, waits);
}

void NcclCommunicator::settle(const std::string& what, const std::string& waits) {
  Patience patience(timeout_);
  while (true) {
    ncclResult_t state = ncclSuccess;
    require_no_error(what, waits, ncclCommGetAsyncError(comm_, &state));
    require_no_error(what, waits, state);
    if (state == ncclSuccess) return;
    if (patience.over()) fail(what, waits, in_vain());
    patience.pause();
  }
}

void NcclCommunicator::wait_on_host(cudaEvent_t event, const std::string& what, const std::string& waits) {
  if (comm_ == nullptr) {
    throw RuntimeError(text("[distributed] ", what, ": rank ", rank_, "'s communicator was aborted after an error"));
  }
  Patience patience(timeout_);
  while (true) {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady) fail(what, waits, text("and CUDA says: ", cudaGetErrorString(status)));
    ncclResult_t state = ncclSuccess;
    require_no_error(what, waits, ncclCommGetAsyncError(comm_, &state));
    require_no_error(what, waits, state);
    if (patience.over()) fail(what, waits, in_vain());
    patience.pause();
  }
}

void NcclCommunicator::fail(const std::string& what, const std::string& waits, const std::string& why) {
  // What NCCL has on the GPU ends by this, so that memory may be given back. A caller's communicator is his to abort.
  if (comm_ != nullptr && (owned_ || timeout_)) ncclCommAbort(std::exchange(comm_, nullptr));
  throw RuntimeError(text("[distributed] ", what, ": rank ", rank_, " ", waits, ", ", why));
}

const Check& checked(const Check& check, const NcclOptions& options) {
  check.require(!options.timeout || options.timeout->count() > 0, "timeout is ",
                options.timeout.value_or(std::chrono::milliseconds(0)).count(), " ms: it must be above 0");
  return check;
}

}  // namespace

NcclId new_nccl_id() {
  ncclUniqueId unique;
  check_nccl(ncclGetUniqueId(&unique), "id of ranks");
  NcclId out;
  std::memcpy(out.bytes.data(), &unique, sizeof unique);
  return out;
}

std::unique_ptr<Communicator> nccl_communicator(const NcclId& id, int size, int rank, const NcclOptions& options) {
  const Check check("distributed.nccl_communicator");
  checked(check, options)
      .require(size >= 1 && rank >= 0 && rank < size, "size is ", size, " and rank ", rank,
               ": it must be size >= 1 and 0 <= rank < size");
  check.require(options.multiprocessors >= 0, "multiprocessors is ", options.multiprocessors,
                ": it must be at least 1, or 0 for NCCL's choice");
  return std::make_unique<NcclCommunicator>(id, size, rank, options);
}

std::unique_ptr<Communicator> nccl_communicator(void* comm, const NcclOptions& options) {
  const Check check("distributed.nccl_communicator");
  checked(check, options).require(comm != nullptr, "comm is null: it must be an ncclComm_t");
  check.require(options.multiprocessors == 0, "multiprocessors is ", options.multiprocessors,
                ": a communicator that is there already has its own, so it must be 0");
  const auto of_caller = static_cast<ncclComm_t>(comm);
  int size = 0, rank = 0, gpu = 0;
  check_nccl(ncclCommCount(of_caller, &size), "communicator");
  check_nccl(ncclCommUserRank(of_caller, &rank), "communicator");
  check_nccl(ncclCommCuDevice(of_caller, &gpu), "communicator");
  check.require(gpu == current_gpu(), "comm is of GPU ", gpu, ": it must be of the current one, ", current_gpu());
  return std::make_unique<NcclCommunicator>(of_caller, size, rank, options);
}

}  // namespace heddle::distributed
