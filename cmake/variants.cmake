# The instantiations of kernels: what the tables in src/cuda/*/*/variants.h list, as src/cuda/common/variants.h has it.

# Those that heddle_soak_planted compiles anew with faults in them, of src/cuda/sm90/, and the one whose fences it leaves out.
# Each has a source of its own, so that only it is compiled twice.
set(heddle_planted_kernels
  attention_bwd/bf16_d128 attention_decode/bf16_d128 attention_decode/bf16_d128_warpgroup
  attention_fwd/bf16_d128 attention_fwd/bf16_d128_planes attention_fwd_fp8/bf16_d128
  linear_w4a16/bf16_t8 linear_w4a8/bf16_t64 linear_w4a8/bf16_t64r2)
set(heddle_unfenced_kernel attention_fwd/f16_d128)

# heddle_read_variants(out table): the instantiations that a variants.h asks for, named sm90/attention_fwd/bf16_d64_softcap
# (folder, type, row). heddle_instance_<name> is then what instantiates it.
function(heddle_read_variants out table)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})
  file(RELATIVE_PATH folder ${CMAKE_CURRENT_SOURCE_DIR}/cuda ${table})
  get_filename_component(folder ${folder} DIRECTORY)
  file(READ ${table} text)
  string(REGEX REPLACE "//[^\n]*" "" text "${text}")
  string(REGEX MATCHALL "constexpr Row k[A-Za-z0-9]*Variants\\[\\] = {[^;]*}" tables "${text}")
  if(NOT tables)
    message(FATAL_ERROR "${table} has no 'constexpr Row kVariants[] = {...}'")
  endif()
  set(found "")
  set(types_so_far "")
  foreach(rows IN LISTS tables)
    string(REGEX REPLACE "^constexpr Row k([A-Za-z0-9]*)Variants.*$" "\\1" some "${rows}")
    if(NOT text MATCHES "constexpr DType k${some}Types\\[\\] = {([^;]*)}")
      message(FATAL_ERROR "${table} has k${some}Variants, but no 'constexpr DType k${some}Types[] = {...}'")
    endif()
    string(REGEX REPLACE "[ \n]+" "" types "${CMAKE_MATCH_1}")
    string(REPLACE "," ";" types "${types}")
    string(REGEX MATCHALL "[.]name = \"[^\"]*\"" names "${rows}")
    string(REGEX MATCHALL "\n *{" lines "${rows}")
    list(LENGTH names name_count)
    list(LENGTH lines line_count)
    if(name_count EQUAL 0 OR NOT name_count EQUAL line_count)
      message(FATAL_ERROR "${table}: k${some}Variants has ${line_count} lines that begin a row, with '{', and ${name_count} names; "
        "each row begins a line, and has one '.name = \"...\"'")
    endif()
    foreach(type IN LISTS types)
      if(NOT type MATCHES "^DType::([a-z0-9]+)$")
        message(FATAL_ERROR "${table}: '${type}' in k${some}Types is no DType::...")
      endif()
      set(type_name ${CMAKE_MATCH_1})
      if(type IN_LIST types_so_far)
        message(FATAL_ERROR "${table}: ${type} is twice among the types; a type has one table")
      endif()
      list(APPEND types_so_far ${type})
      foreach(name IN LISTS names)
        string(REGEX REPLACE "^[.]name = \"(.*)\"$" "\\1" name "${name}")
        if(NOT name MATCHES "^[a-z0-9]+( [a-z0-9]+)*$")
          message(FATAL_ERROR "${table}: the name '${name}' is not of words in a-z and 0-9")
        endif()
        string(REPLACE " " "_" file_name "${type_name}_${name}")
        set(instance ${folder}/${file_name})
        if(instance IN_LIST found)
          message(FATAL_ERROR "${table}: two rows of k${some}Variants have the name '${name}'")
        endif()
        list(APPEND found ${instance})
        set(heddle_instance_${instance} "Instance<${type}, row_named(k${some}Variants, \"${name}\")>" PARENT_SCOPE)
      endforeach()
    endforeach()
  endforeach()
  set(${out} ${found} PARENT_SCOPE)
endfunction()

# heddle_kernel_sources(out name...): the sources of these kernels: of one named *.cu that file of src/cuda, of
# instantiations sources in the build folder. Those of a folder and a type stand in one four at a time: a compiler that
# starts for each would spend a third of its time on headers. Of kernels that are only to compile, on which it spends most of
# it, all do. Such a source has the first one's name.
function(heddle_kernel_sources out)
  set(found "")
  set(written "")
  set(group_type "")
  foreach(name IN LISTS ARGN)
    if(name MATCHES "[.]cu$")
      list(APPEND found ${CMAKE_CURRENT_SOURCE_DIR}/cuda/${name})
      continue()
    endif()
    string(REGEX REPLACE "^sm90/" "" short_name ${name})
    string(REGEX REPLACE "_[^/]*$" "" type ${name})
    if(short_name IN_LIST heddle_planted_kernels OR short_name STREQUAL heddle_unfenced_kernel)
      set(source ${name})
    else()
      if(NOT type STREQUAL group_type OR (group_size EQUAL 4 AND NOT (HEDDLE_CUDA_ONE_CODE AND type MATCHES "/f16$")))
        set(group ${name})
        set(group_type ${type})
        set(group_size 0)
      endif()
      set(source ${group})
      math(EXPR group_size "${group_size} + 1")
    endif()
    list(APPEND written ${source})
    string(APPEND instances_${source} "template struct ${heddle_instance_${name}};\n")
  endforeach()
  list(REMOVE_DUPLICATES written)
  foreach(source IN LISTS written)
    get_filename_component(folder ${source} DIRECTORY)
    string(REPLACE "/" "::" namespace heddle::cuda::${folder})
    set(path ${CMAKE_CURRENT_BINARY_DIR}/cuda/${source}.cu)
    file(CONFIGURE OUTPUT ${path} CONTENT "// Of src/cuda/${folder}/variants.h, by cmake/variants.cmake.
#include \"cuda/${folder}/launch.cuh\"

namespace ${namespace} {

${instances_${source}}
}  // namespace ${namespace}
" @ONLY)
    list(APPEND found ${path})
  endforeach()
  set(${out} ${found} PARENT_SCOPE)
endfunction()
