# The GPU kernels, or the file that stands in for them.
if(NOT HEDDLE_CUDA_FOUND)
  target_sources(heddle PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/stubs/cuda.cc)
  return()
endif()

set(heddle_code_any -gencode=arch=compute_80,code=[sm_80,compute_80] -gencode=arch=compute_90,code=sm_90)
set(heddle_code_sm80 -gencode=arch=compute_80,code=[sm_80,compute_80])
set(heddle_code_sm90 -gencode=arch=compute_90a,code=sm_90a)

file(GLOB_RECURSE heddle_cuda_host CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/*.cc)
target_sources(heddle PRIVATE ${heddle_cuda_host})
foreach(room IN ITEMS any sm80 sm90)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/${room}/*.cu)
  target_sources(heddle PRIVATE ${sources})
  set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "${heddle_code_${room}}")
endforeach()
# Hopper runs it for what sm90 refuses: code for it, so that no first call waits for a compiler.
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/sm80/attention_fwd/inst/*.cu)
set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS -gencode=arch=compute_80,code=[sm_80,sm_90,compute_80])
# On Hopper it adds in vectors, an instruction that code for sm_80 has not.
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/sm80/attention_bwd/inst/*.cu)
set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "${heddle_code_any}")
# On Hopper launches overlap.
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/sm80/linear/inst/*.cu)
set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "${heddle_code_any}")
# From sm_89 on, one instruction widens e4m3.
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/sm80/attention_decode/inst/*_e4m3_*.cu)
set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS
  "${heddle_code_sm80};-gencode=arch=compute_89,code=[sm_89,compute_89]")
# From sm_89 on, one rounds to it; on Hopper launches overlap, which takes code of compute_90.
set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/cuda/any/linear/inst/rows_e4m3.cu PROPERTIES COMPILE_OPTIONS
  "-gencode=arch=compute_89,code=[sm_89,compute_89];-gencode=arch=compute_90,code=sm_90")
target_compile_options(heddle PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xptxas=-v -Xcompiler=-Wall>)
# A quarter of the size. A kernel is unpacked when it is first called.
include(CheckCompilerFlag)
check_compiler_flag(CUDA --compress-mode=size HEDDLE_NVCC_COMPRESSES)
if(HEDDLE_NVCC_COMPRESSES)
  target_compile_options(heddle PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
endif()
set_target_properties(heddle PROPERTIES
  CUDA_RUNTIME_LIBRARY Static
  CUDA_COMPILER_LAUNCHER "${heddle_cuda_launcher}")
target_link_libraries(heddle PRIVATE CUDA::cudart_static)
target_include_directories(heddle PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
