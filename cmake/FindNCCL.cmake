# NCCL::nccl, from 2.18 on. NCCL_ROOT, of CMake or the environment, has include/nccl.h and lib/libnccl.so or libnccl.so.2: for
# NVIDIA's packages for Python it is site-packages/nvidia/nccl.
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_ROOT} ENV NCCL_ROOT PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${NCCL_ROOT} ENV NCCL_ROOT PATH_SUFFIXES lib lib64)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
if(NCCL_INCLUDE_DIR)
  file(READ ${NCCL_INCLUDE_DIR}/nccl.h nccl_header)
  string(REGEX MATCH "#define NCCL_MAJOR ([0-9]+)" nccl_line "${nccl_header}")
  set(NCCL_VERSION "${CMAKE_MATCH_1}")
  string(REGEX MATCH "#define NCCL_MINOR ([0-9]+)" nccl_line "${nccl_header}")
  string(APPEND NCCL_VERSION ".${CMAKE_MATCH_1}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)
if(NCCL_FOUND AND NOT TARGET NCCL::nccl)
  add_library(NCCL::nccl SHARED IMPORTED)
  set_target_properties(NCCL::nccl PROPERTIES
    IMPORTED_LOCATION ${NCCL_LIBRARY}
    IMPORTED_SONAME libnccl.so.2
    INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
endif()
