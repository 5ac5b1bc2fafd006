// Ranks that are GPUs, one for each of MPI's processes, which find each other over MPI. For programs that link both
// heddle::mpi and heddle::nccl.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "heddle/distributed_mpi.h"
#include "heddle/distributed_nccl.h"
#include "heddle/error.h"

namespace heddle::distributed {

// The ranks of a communicator of MPI (MPI_Comm_c2f), each with its current GPU, which the caller has chosen: by
// mpi_local_rank(), for example. All its processes call this, between MPI_Init and MPI_Finalize. The result needs MPI
// no more. Throws as mpi_communicator() and nccl_communicator() do; without a timeout MPI, too, is waited for without
// end.
inline std::unique_ptr<Communicator> nccl_communicator_of_mpi(int fortran_handle, const NcclOptions& options = {}) {
  constexpr std::chrono::hours kForEver(24 * 365);
  const auto processes = mpi_communicator(fortran_handle, options.timeout.value_or(kForEver));
  const int rank = processes->rank(), size = processes->size();
  // Rank 0's id is told with whether there is one, so that no other waits for it where there is none.
  struct Told {
    std::byte there{0};
    NcclId id{};
  };
  std::vector<Told> told(static_cast<std::size_t>(size));
  std::string why = "[distributed.nccl_communicator_of_mpi] rank 0 got no id from NCCL, and says why";
  if (rank == 0) {
    try {
      told[0] = {std::byte{1}, new_nccl_id()};
    } catch (const RuntimeError& error) {
      why = error.what();
    }
  }
  std::vector<std::span<std::byte>> parts;
  for (Told& one : told) parts.push_back(std::as_writable_bytes(std::span(&one, 1)));
  processes->all_gather(parts[static_cast<std::size_t>(rank)], parts, "id of NCCL told");
  if (told[0].there == std::byte{0}) throw RuntimeError(why);
  return nccl_communicator(told[0].id, size, rank, options);
}

}  // namespace heddle::distributed
