# Decides whether the GPU kernels are built: HEDDLE_CUDA_FOUND.
set(HEDDLE_CUDA_FOUND OFF)
if(NOT HEDDLE_CUDA STREQUAL "OFF")
  # Each kernel names the chips it is for; CMake is to add none. The compiler check must not need any either.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit QUIET)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8 AND CUDAToolkit_FOUND)
      set(HEDDLE_CUDA_FOUND ON)
      # CMake 3.25 does not know that nvcc has C++20.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
  endif()
  if(NOT HEDDLE_CUDA_FOUND AND NOT HEDDLE_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "HEDDLE_CUDA is ${HEDDLE_CUDA}, but there is no nvcc 12.8 or later; "
      "put it on the PATH, or name it with CUDACXX or CMAKE_CUDA_COMPILER")
  endif()
endif()
if(SKBUILD AND NOT HEDDLE_CUDA_FOUND)
  find_program(heddle_nvcc nvcc HINTS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin NO_CACHE)
  if(heddle_nvcc)
    message(STATUS "${heddle_nvcc} was found, but the package gets no GPU kernels, since nobody asked for them: "
      "pip install . --config-settings=cmake.define.HEDDLE_CUDA=ON")
  endif()
endif()
# How kernels are compiled: refused when they spill, through the same cache as C++ where there is one.
set(heddle_cuda_launcher ${PROJECT_SOURCE_DIR}/cmake/strict_ptxas.sh ${CMAKE_CXX_COMPILER_LAUNCHER})
if(HEDDLE_CUDA_FOUND)
  include(CheckCompilerFlag)
  # A quarter of the size. A kernel is unpacked when it is first called.
  check_compiler_flag(CUDA --compress-mode=size HEDDLE_NVCC_COMPRESSES)
  check_compiler_flag(CUDA -Ofc=max HEDDLE_NVCC_COMPILES_FAST)
endif()

# heddle_only_to_compile(out code...): the codes, or with HEDDLE_CUDA_ONE_CODE what shows soonest that a kernel compiles: PTX of the
# last one's, hardly optimised.
function(heddle_only_to_compile out)
  set(codes ${ARGN})
  if(HEDDLE_CUDA_ONE_CODE)
    list(GET codes -1 codes)
    string(REGEX REPLACE "arch=([a-z0-9_]+),code=.*" "arch=\\1,code=\\1" codes "${codes}")
    if(HEDDLE_NVCC_COMPILES_FAST)
      list(APPEND codes -Ofc=max)
    endif()
  endif()
  set(${out} "${codes}" PARENT_SCOPE)
endfunction()
message(STATUS "GPU kernels: ${HEDDLE_CUDA_FOUND}")
include(cmake/variants.cmake)
