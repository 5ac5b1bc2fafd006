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
# Of src/cuda: the sources of kernels, and the names of instantiations (cmake/variants.cmake).
file(GLOB_RECURSE heddle_kernels CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/cuda ${CMAKE_CURRENT_SOURCE_DIR}/cuda/*.cu)
file(GLOB_RECURSE heddle_tables CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/*/*/variants.h)
foreach(table IN LISTS heddle_tables)
  heddle_read_variants(names ${table})
  list(APPEND heddle_kernels ${names})
endforeach()

# heddle_kernels_for(code, pattern): those that match and that no earlier call took are compiled with these options.
macro(heddle_kernels_for code pattern)
  set(codes ${code})
  if(HEDDLE_CUDA_ONE_CODE)
    list(GET codes -1 codes)
    string(REGEX REPLACE "code=\\[([a-z0-9_]+),.*\\]" "code=\\1" codes "${codes}")
  endif()
  set(names ${heddle_kernels})
  list(FILTER names INCLUDE REGEX "^${pattern}")
  list(REMOVE_ITEM heddle_kernels ${names})
  heddle_kernel_sources(sources ${names})
  target_sources(heddle PRIVATE ${sources})
  set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "${codes}")
  if(HEDDLE_CUDA_ONE_CODE)
    # The same source in bfloat16 says what the assembler thinks of it.
    heddle_only_to_compile(codes ${codes})
    list(FILTER sources INCLUDE REGEX "/f16_[^/]*$")
    if(sources)
      set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "${codes}")
    endif()
  endif()
endmacro()
# Hopper runs it for what sm90 refuses: code for it, so that no first call waits for a compiler.
heddle_kernels_for("-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]" "sm80/attention_fwd/")
# On Hopper it adds in vectors, an instruction that code for sm_80 has not.
heddle_kernels_for("${heddle_code_any}" "sm80/attention_bwd/")
# On Hopper launches overlap.
heddle_kernels_for("${heddle_code_any}" "sm80/linear/")
# From sm_89 on, one instruction widens e4m3.
heddle_kernels_for("${heddle_code_sm80};-gencode=arch=compute_89,code=[sm_89,compute_89]" "sm80/attention_decode/[a-z0-9]*_e4m3_")
# From sm_89 on, one rounds to it; on Hopper launches overlap, which takes code of compute_90.
heddle_kernels_for("-gencode=arch=compute_89,code=[sm_89,compute_89];-gencode=arch=compute_90,code=sm_90" "any/linear/rows_e4m3")
set(heddle_code_common ${heddle_code_any})
foreach(room IN ITEMS common any sm80 sm90)
  heddle_kernels_for("${heddle_code_${room}}" "${room}/")
endforeach()
target_compile_options(heddle PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xptxas=-v -Xcompiler=-Wall>)
if(HEDDLE_NVCC_COMPRESSES AND NOT HEDDLE_CUDA_ONE_CODE)  # it takes seconds
  target_compile_options(heddle PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
endif()
set_target_properties(heddle PROPERTIES
  CUDA_RUNTIME_LIBRARY Static
  CUDA_COMPILER_LAUNCHER "${heddle_cuda_launcher}")
target_link_libraries(heddle PRIVATE CUDA::cudart_static)
target_include_directories(heddle PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
