# heddle::nccl, attention over GPUs by NCCL: a library of its own, so that nothing else needs NCCL to be on a machine.
if(NOT HEDDLE_NCCL_FOUND)
  return()
endif()
add_library(heddle_nccl ${CMAKE_CURRENT_SOURCE_DIR}/distributed/nccl/communicator.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/distributed/nccl/watch.cc)
add_library(heddle::nccl ALIAS heddle_nccl)
set_target_properties(heddle_nccl PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
  EXPORT_NAME nccl
  DEFINE_SYMBOL "")
target_include_directories(heddle_nccl PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${CUDAToolkit_INCLUDE_DIRS})
target_compile_options(heddle_nccl PRIVATE -Wall -Wextra)
target_link_libraries(heddle_nccl PUBLIC heddle PRIVATE NCCL::nccl CUDA::cudart_static Threads::Threads)
