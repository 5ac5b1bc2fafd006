# The kernels that heddle_soak_planted compiles anew with faults in them, from src/cuda/sm90/, without .cu, and the one whose
# fences it leaves out. Each has an object of its own, so that only it is compiled twice.
set(heddle_planted_kernels
  attention_bwd/inst/bf16_d128 attention_decode/inst/bf16_d128 attention_decode/inst/bf16_d128_warpgroup
  attention_fwd/inst/bf16_d128 attention_fwd/inst/bf16_d128_planes attention_fwd_fp8/inst/bf16_d128
  linear_w4a16/inst/bf16_t8 linear_w4a8/inst/bf16_t64 linear_w4a8/inst/bf16_t64r2)
set(heddle_unfenced_kernel attention_fwd/inst/f16_d128)

# heddle_group_kernels(out source...): the sources to compile in place of these instantiations. Those of a folder and a
# type are included four at a time: a compiler that starts for each would spend a third of its time on headers. The
# objects have the folder and the first source's name.
function(heddle_group_kernels out)
  set(folder ${CMAKE_CURRENT_SOURCE_DIR}/cuda)
  set(found "")
  list(SORT ARGN)
  foreach(source IN LISTS ARGN)
    file(RELATIVE_PATH path ${folder} ${source})
    string(REGEX REPLACE "^sm90/(.*)[.]cu$" "\\1" name ${path})
    string(REGEX MATCH "^(.*/inst/[a-z0-9]+)_" type ${path})
    if(NOT type OR name IN_LIST heddle_planted_kernels OR name STREQUAL heddle_unfenced_kernel)
      list(APPEND found ${source})
      continue()
    endif()
    if(NOT type STREQUAL "${group_type}" OR group_size EQUAL 4)
      set(group_type ${type})
      set(group_size 0)
      set(group ${CMAKE_CURRENT_BINARY_DIR}/cuda/${path})
      list(APPEND found ${group})
      list(APPEND groups ${group})
      set(text_of_${group} "")
    endif()
    math(EXPR group_size "${group_size} + 1")
    string(APPEND text_of_${group} "#include \"cuda/${path}\"\n")
  endforeach()
  foreach(group IN LISTS groups)
    file(CONFIGURE OUTPUT ${group} CONTENT "${text_of_${group}}" @ONLY)
  endforeach()
  set(${out} ${found} PARENT_SCOPE)
endfunction()
