# heddle::mpi, attention over MPI's processes: a library of its own, so that nothing else needs MPI to be on a machine.
if(NOT HEDDLE_MPI_FOUND)
  return()
endif()
add_library(heddle_mpi ${CMAKE_CURRENT_SOURCE_DIR}/distributed/mpi/communicator.cc)
add_library(heddle::mpi ALIAS heddle_mpi)
set_target_properties(heddle_mpi PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
  EXPORT_NAME mpi
  DEFINE_SYMBOL "")
target_include_directories(heddle_mpi PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_definitions(heddle_mpi PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)  # the C interface alone
target_compile_options(heddle_mpi PRIVATE -Wall -Wextra)
target_link_libraries(heddle_mpi PUBLIC heddle PRIVATE MPI::MPI_CXX)
