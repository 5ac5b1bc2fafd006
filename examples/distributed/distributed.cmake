# Attention over MPI's processes (examples/distributed/README.md).
if(NOT HEDDLE_MPI_FOUND)
  return()
endif()
add_executable(heddle_distributed distributed/main.cc)
target_compile_definitions(heddle_distributed PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
target_compile_options(heddle_distributed PRIVATE -Wall -Wextra)
target_link_libraries(heddle_distributed PRIVATE heddle::mpi MPI::MPI_CXX)
