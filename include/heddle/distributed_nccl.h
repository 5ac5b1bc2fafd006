// Ranks that are GPUs, one each, by NCCL. In a library of its own, heddle::nccl, where heddle was built with CUDA and
// NCCL.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>

#include "heddle/distributed.h"

namespace heddle::distributed {

// What ranks find each other by: ncclUniqueId's bytes.
struct NcclId {
  std::array<std::byte, 128> bytes;
};
// One rank makes it, and the caller sends it to the others, by a file, MPI or what there is. Throws RuntimeError.
NcclId new_nccl_id();

struct NcclOptions {
  // How long all ranks may take to make the communicator, to begin an exchange, to end it once it has begun, and to
  // leave. None: for ever.
  std::optional<std::chrono::milliseconds> timeout = std::chrono::minutes(10);
  // Who finds that an exchange takes longer, or that NCCL says it has failed, and what follows. Either way exchanges
  // are aborted, and each later call of the communicator throws RuntimeError with the exchange and the rank.
  //   false: a thread of the communicator. The host goes on, but for the first exchange of two ranks, which connects
  //     them. What this process has on the GPU is ended, so that nothing behind the exchange is taken for a result:
  //     calls of CUDA for this GPU are errors from then on. Each exchange has a kernel of one thread behind it for
  //     that. What is captured into a CUDA graph is not watched when the graph runs: there a lost rank is waited for.
  //   true: the host, which waits for each exchange, and for what was put on its stream before it. Transfer::wait()
  //     throws, and the GPU is as usable as before. Nothing can be captured.
  bool host_waits = false;
  // How many multiprocessors an exchange takes at most (NCCL's maxCTAs), from 1 on, while products run on the others.
  // 0: NCCL's choice.
  int multiprocessors = 0;
};

// Rank `rank` of `size` on the current GPU. All ranks call this with one id, which serves once; each has a GPU of its
// own, and is a process, or a thread of one that shares it. Exchanges are on a stream of the communicator's own
// (Communicator::use_stream has the caller's). Lengths that two ranks do not agree on are not told: a rank waits.
// Graphs that hold exchanges are destroyed before the communicator, which NCCL has wait for them.
//
// Ranks that are threads of one process: what loads a kernel, takes or gives back memory (cudaMalloc, cudaFree) may
// wait for a GPU that waits for another rank, which then cannot go on. CUDA_MODULE_LOADING=EAGER loads kernels before.
//
// Throws Error on a bad argument, RuntimeError where NCCL fails.
std::unique_ptr<Communicator> nccl_communicator(const NcclId& id, int size, int rank, const NcclOptions& options = {});
// The same of an ncclComm_t of the current GPU, which the caller keeps, destroys afterwards, and does not use beside a
// call or while an exchange is on its way. NcclOptions::multiprocessors was chosen when it was made, and is 0 here. It
// should have been made with blocking 0: else the first exchange of two ranks may wait for one that is lost inside of
// NCCL, which no timeout ends. Where an exchange has failed it is the caller's to abort; with host_waits
// ncclCommAbort() has been called on it: it is gone.
std::unique_ptr<Communicator> nccl_communicator(void* comm, const NcclOptions& options = {});

}  // namespace heddle::distributed
