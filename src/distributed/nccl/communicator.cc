// Exchanges by NCCL's sends and receives on a stream of their own, ordered with the caller's by events.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cuda/rank_memory.h"
#include "distributed/nccl/watch.h"
#include "heddle/distributed_nccl.h"

namespace heddle::distributed {
namespace {

static_assert(sizeof(NcclId) == sizeof(ncclUniqueId));

void check_nccl(ncclResult_t result, const Purpose& purpose) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  throw RuntimeError(text(beginning(purpose), "NCCL: ", ncclGetErrorString(result)));
}

int current_gpu() {
  int gpu = 0;
  check_cuda(cudaGetDevice(&gpu), "communicator");
  return gpu;
}

bool captured(cudaStream_t stream, const Purpose& purpose) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), purpose);
  return status != cudaStreamCaptureStatusNone;
}

// Of the host, and read by the GPU: 0, or 1 for good. It stays where kernels may still read it.
class Flag {
 public:
  Flag() {
    void* data = nullptr;
    check_cuda(cudaHostAlloc(&data, sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable), "communicator");
    data_ = static_cast<int*>(data);
    *data_ = 0;
  }
  Flag(const Flag&) = delete;
  Flag& operator=(const Flag&) = delete;
  ~Flag() {
    if (*data_ == 0) cudaFreeHost(data_);
  }
  const int* data() const { return data_; }
  void raise() { std::atomic_ref(*data_).store(1); }

 private:
  int* data_ = nullptr;
};

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(const NcclId& id, int size, int rank, const NcclOptions& options)
      : NcclCommunicator(options, size, rank, true) {
    ncclUniqueId unique;
    std::memcpy(&unique, id.bytes.data(), sizeof unique);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    // Without a timeout nobody would look at what goes on in the background, and each exchange would start a thread.
    config.blocking = timeout_ ? 0 : 1;
    if (options.multiprocessors > 0) config.maxCTAs = options.multiprocessors;
    const Purpose purpose = "communicator made";
    const ncclResult_t result = ncclCommInitRankConfig(&comm_, size, unique, rank, &config);
    if (result != ncclSuccess && result != ncclInProgress) comm_ = nullptr;
    check_nccl(result, purpose);
    settle(purpose, text("rank ", rank_, " waits for the other ranks"));
    watch();
  }
  NcclCommunicator(ncclComm_t comm, int size, int rank, const NcclOptions& options)
      : NcclCommunicator(options, size, rank, false) {
    comm_ = comm;
    watch();
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  ~NcclCommunicator() override {
    watch_.reset();  // it goes on until all is done, or has failed
    // What is on its way may never be done where a rank is lost; a timeout says how long that is believed in.
    if (comm_ != nullptr && owned_ && !aborted_) {
      if (!timeout_ || (done_in_time() && finalized_in_time())) {
        ncclCommDestroy(comm_);
      } else {
        ncclCommAbort(comm_);
      }
    }
    cudaStreamDestroy(own_stream_);
    if (end_stream_ != nullptr) cudaStreamDestroy(end_stream_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return "NCCL"; }
  Device device() const override { return Device::cuda; }
  void use_stream(void* stream) override { stream_ = static_cast<cudaStream_t>(stream); }
  void* stream() const override { return stream_; }
  void throw_if_failed() override {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw RuntimeError(failure_);
  }
  std::unique_ptr<Transfer> exchange(std::span<const std::byte> out, int to, std::span<std::byte> in, int from,
                                     const Purpose& purpose) override;

 private:
  friend class NcclTransfer;

  NcclCommunicator(const NcclOptions& options, int size, int rank, bool owned)
      : timeout_(options.timeout),
        host_waits_(options.host_waits),
        size_(size),
        rank_(rank),
        owned_(owned),
        gpu_(current_gpu()) {
    // Of the highest priority: an exchange takes the first multiprocessors that products leave.
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "communicator");
    check_cuda(cudaStreamCreateWithPriority(&own_stream_, cudaStreamNonBlocking, greatest), "communicator");
    if (!timeout_ || host_waits_) return;
    failed_.emplace();
    if (!owned_)
      check_cuda(cudaStreamCreateWithPriority(&end_stream_, cudaStreamNonBlocking, greatest), "communicator");
    // Loaded now: what loads a kernel may wait for one that waits for another rank.
    cuda::end_if(failed_->data(), own_stream_);
    check_cuda(cudaStreamSynchronize(own_stream_), "communicator");
  }
  void watch() {
    if (!failed_) return;
    const auto fault = [this] {
      std::string said;
      // A host that is inside of NCCL may stay there for the rank that is lost: nothing is known then, and time counts.
      const std::unique_lock calls(calls_, std::try_to_lock);
      if (calls && usable()) state(said);
      return said;
    };
    const auto failed = [this](const Purpose& purpose, const std::string& waiting, const std::string& why) {
      give_up(lost(purpose, waiting, timeout_, why));
    };
    watch_.emplace(gpu_, *timeout_, fault, failed);
  }

  void require_usable(const Purpose& purpose);
  // Until NCCL has taken what it was given. waiting: what this rank does meanwhile, for the error.
  void settle(const Purpose& purpose, const std::string& waiting);
  // Until the event is there. Throws as settle() does.
  void wait_on_host(cudaEvent_t event, const Purpose& purpose, const std::string& waiting);

  // Later calls say this, and none of NCCL's begins. From any thread; the first one counts.
  void give_up(const std::string& said) {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_.empty()) return;
      failure_ = said;
      // Before exchanges end, which then are no results.
      if (failed_) failed_->raise();
    }
    if (owned_ || host_waits_) {
      // One that is inside of NCCL and does not come out is what aborting is for.
      std::unique_lock calls(calls_, std::try_to_lock);
      for (Patience patience(kToLeaveNccl); !calls && !patience.over(); patience.pause()) calls.try_lock();
      aborted_ = true;
      ncclCommAbort(comm_);  // what NCCL has on the GPU ends, so that memory may be given back
    } else if (failed_) {
      try {
        cuda::end_if(failed_->data(), end_stream_);
      } catch (const RuntimeError&) {  // then the GPU's work has ended already
      }
    }
  }
  [[noreturn]] void fail(const Purpose& purpose, const std::string& waiting, const std::string& why) {
    const std::string said = lost(purpose, waiting, timeout_, why);
    give_up(said);
    throw_if_failed();
    throw RuntimeError(said);  // not reached
  }
  // Whether nothing has failed.
  bool usable() {
    const std::lock_guard lock(mutex_);
    return failure_.empty();
  }
  // What NCCL is at; said: what has failed, or stays empty. With the lock of its calls.
  ncclResult_t state(std::string& said) {
    ncclResult_t now = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &now);
    said = fault_of(asked == ncclSuccess ? now : asked);
    return now;
  }
  std::string fault_of(ncclResult_t result) {
    if (result == ncclSuccess || result == ncclInProgress) return {};
    const char* const last = aborted_ ? nullptr : ncclGetLastError(comm_);
    return text("NCCL says: ", ncclGetErrorString(result), last != nullptr ? ", " : "", last != nullptr ? last : "");
  }
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
  const bool host_waits_;
  const int size_, rank_;
  const bool owned_;
  const int gpu_;
  static constexpr std::chrono::milliseconds kToLeaveNccl{1000};
  std::mutex calls_;  // of NCCL's with comm_
  ncclComm_t comm_ = nullptr;
  std::atomic<bool> aborted_ = false;  // comm_ is gone
  std::mutex mutex_;
  std::string failure_;
  cudaStream_t own_stream_ = nullptr, stream_ = nullptr;
  cudaStream_t end_stream_ = nullptr;  // of a caller's communicator, which is his to abort
  std::optional<Flag> failed_;         // where exchanges are watched
  Events events_;
  std::optional<Watch> watch_;
};

// Of an exchange that has nothing to send and nothing to receive.
class NoTransfer : public Transfer {
 public:
  void wait() override {}
};

class NcclTransfer : public Transfer {
 public:
  NcclTransfer(NcclCommunicator& of, Event done, Purpose purpose, std::string waiting)
      : of_(of), done_(std::move(done)), purpose_(std::move(purpose)), waiting_(std::move(waiting)) {}

  void wait() override {
    if (waited_) return;
    if (of_.host_waits_) of_.wait_on_host(done_.get(), purpose_, waiting_);
    of_.throw_if_failed();
    check_cuda(cudaStreamWaitEvent(of_.stream_, done_.get(), 0), purpose_);
    waited_ = true;
  }

 private:
  NcclCommunicator& of_;
  const Event done_;
  const Purpose purpose_;
  const std::string waiting_;
  bool waited_ = false;
};

void NcclCommunicator::require_usable(const Purpose& purpose) {
  throw_if_failed();
  const int gpu = current_gpu();
  if (gpu != gpu_) {
    throw Error(text(beginning(purpose), "the current GPU is ", gpu, ": it must be the communicator's, ", gpu_));
  }
}

std::unique_ptr<Transfer> NcclCommunicator::exchange(std::span<const std::byte> out, int to, std::span<std::byte> in,
                                                     int from, const Purpose& purpose) {
  if (out.empty() && in.empty()) return std::make_unique<NoTransfer>();
  require_usable(purpose);
  const bool in_graph = timeout_ && captured(stream_, purpose);
  if (in_graph && host_waits_) {
    throw Error(text(beginning(purpose),
                     "the stream is captured and host_waits is true: the host would wait for what does not run yet"));
  }
  const std::string waits = waiting(rank_, !in.empty(), in.empty() ? to : from);
  Event before = events_.recorded(stream_, purpose);
  check_cuda(cudaStreamWaitEvent(own_stream_, before.get(), 0), purpose);
  std::string said;
  {
    const std::lock_guard calls(calls_);
    throw_if_failed();
    // In one group, so that neither waits for the other. A group that was begun is ended.
    ncclResult_t results[] = {ncclGroupStart(), ncclSuccess, ncclSuccess, ncclSuccess};
    if (results[0] == ncclSuccess) {
      if (!out.empty()) results[1] = ncclSend(out.data(), out.size(), ncclUint8, to, comm_, own_stream_);
      if (!in.empty()) results[2] = ncclRecv(in.data(), in.size(), ncclUint8, from, comm_, own_stream_);
      results[3] = ncclGroupEnd();
    }
    for (const ncclResult_t result : results) {
      if (said.empty()) said = fault_of(result);
    }
  }
  if (!said.empty()) fail(purpose, waits, said);
  settle(purpose, waits);
  if (watch_) cuda::end_if(failed_->data(), own_stream_);  // an exchange that was aborted is done, too
  Event done = events_.recorded(own_stream_, purpose);
  if (watch_ && !in_graph) watch_->add(std::move(before), done, purpose, waits);
  return std::make_unique<NcclTransfer>(*this, std::move(done), purpose, waits);
}

void NcclCommunicator::settle(const Purpose& purpose, const std::string& waiting) {
  Patience patience(timeout_);
  while (true) {
    std::string said;
    ncclResult_t now = ncclSuccess;
    {
      const std::lock_guard calls(calls_);
      throw_if_failed();
      now = state(said);
    }
    if (!said.empty()) fail(purpose, waiting, said);
    if (now == ncclSuccess) return;
    if (patience.over()) fail(purpose, waiting, kNotInTime);
    patience.pause();
  }
}

void NcclCommunicator::wait_on_host(cudaEvent_t event, const Purpose& purpose, const std::string& waiting) {
  Patience patience(timeout_);
  while (true) {
    throw_if_failed();
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaSuccess) return;
    std::string said;
    if (status != cudaErrorNotReady) {
      said = text("CUDA says: ", cudaGetErrorString(status));
    } else {
      const std::lock_guard calls(calls_);
      throw_if_failed();
      state(said);
    }
    if (said.empty() && patience.over()) said = kNotInTime;
    if (!said.empty()) fail(purpose, waiting, said);
    patience.pause();
  }
}

constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);

const Check& checked(const Check& check, const NcclOptions& options) {
  check.require(!options.timeout || options.timeout->count() > 0, "timeout is ",
                options.timeout.value_or(std::chrono::milliseconds(0)).count(), " ms: it must be above 0");
  check.require(!options.timeout || *options.timeout <= kLongest, "timeout is ",
                options.timeout.value_or(std::chrono::milliseconds(0)).count(), " ms: it must be no more than ",
                kLongest.count(), ", a year; or none, for ever");
  check.require(options.timeout || !options.host_waits,
                "host_waits is true and there is no timeout: the host would wait for a lost rank for ever");
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
