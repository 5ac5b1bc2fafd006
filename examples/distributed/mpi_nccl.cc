// Attention over GPUs by NCCL, a process of an MPI job for each, forward and backward: held against one GPU, and timed.
//
// usage: mpiexec -n RANKS heddle_distributed_mpi_nccl [ROWS [gather|ring|needed|ulysses|2d|auto]]
#include <heddle/distributed_mpi_nccl.h>
#include <heddle/error.h>
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <exception>

#include "on_gpus.h"

int main(int argc, char** argv) {
  using namespace heddle::distributed;
  MPI_Init(&argc, &argv);
  try {
    const int world = MPI_Comm_c2f(MPI_COMM_WORLD);
    use_gpu(mpi_local_rank(world));
    const auto communicator = nccl_communicator_of_mpi(world, {.timeout = std::chrono::seconds(60)});
    attend_on_gpus(*communicator, argc > 1 ? std::stoll(argv[1]) : 32768,
                   scheme_named(argc > 2 ? argv[2] : "auto", "heddle_distributed_mpi_nccl"));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heddle_distributed_mpi_nccl: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
