// Ranks that are MPI's processes. In a library of its own, heddle::mpi, where heddle was built with MPI.
#pragma once

#include <chrono>
#include <memory>

#include "heddle/distributed.h"

namespace heddle::distributed {

// The ranks of a communicator of MPI, by its Fortran handle: MPI_Comm_c2f(MPI_COMM_WORLD). All its processes call this,
// between MPI_Init and MPI_Finalize, and the result does not outlive the latter; messages of heddle's do not meet those
// of the program. An exchange that takes longer than `timeout`, or that MPI says has failed, throws RuntimeError; its
// memory may still be written then, so the program should end (MPI_Abort). Exchanges make progress while something of
// MPI is called: in the background only as far as the MPI does so by itself.
std::unique_ptr<Communicator> mpi_communicator(int fortran_handle, std::chrono::milliseconds timeout);

// The number of this process among those of the communicator that share its machine, from 0 on in the order of ranks.
// All its processes call this. Throws RuntimeError.
int mpi_local_rank(int fortran_handle);

}  // namespace heddle::distributed
