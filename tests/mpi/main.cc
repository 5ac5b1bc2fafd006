// mpiexec -n RANKS heddle_mpi_tests: every process runs every test, and rank 0 says what became of them.
#include "mpi/job.h"

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>
#include <memory>

#include "heddle/distributed_mpi.h"

namespace {

std::unique_ptr<heddle::distributed::Communicator> all;

// Of the other ranks what fails is printed.
class Failures : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", all->rank(), result.file_name(), result.line_number(),
                 result.message());
  }
};

}  // namespace

heddle::distributed::Communicator& heddle::kit::over_ranks::job() { return *all; }

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  ::testing::InitGoogleTest(&argc, argv);
  all = heddle::distributed::mpi_communicator(MPI_Comm_c2f(MPI_COMM_WORLD), std::chrono::seconds(60));
  if (all->rank() != 0) {
    ::testing::TestEventListeners& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new Failures);
  }
  int failed = RUN_ALL_TESTS();
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  all.reset();
  MPI_Finalize();
  return failed;
}
