# The matrix library of float layers on the CPU. What calls it is a module, which the library opens when the first such layer
# is made: nothing else needs oneDNN, or the libraries that it brings, to be on a machine.
option(HEDDLE_ONEDNN "Linear layers of the encoder by oneDNN" ON)
if(NOT HEDDLE_ONEDNN)
  target_sources(heddle PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/stubs/linear.cc)
  return()
endif()
find_package(dnnl CONFIG REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)  # the runtime oneDNN is threaded with, to keep it at one thread
target_sources(heddle PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/model/onednn/linear.cc)
add_library(heddle_onednn MODULE ${CMAKE_CURRENT_SOURCE_DIR}/model/onednn/module.cc)
add_library(heddle::onednn ALIAS heddle_onednn)
set_target_properties(heddle_onednn PROPERTIES
  EXPORT_NAME onednn
  PREFIX lib SUFFIX .so  # kOneDnnModuleFile, wherever it is
  CXX_VISIBILITY_PRESET hidden)
target_include_directories(heddle_onednn PRIVATE ${PROJECT_SOURCE_DIR}/include ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_options(heddle_onednn PRIVATE -Wall -Wextra)
target_compile_definitions(heddle_onednn PRIVATE HEDDLE_VERSION="${PROJECT_VERSION}")
target_link_libraries(heddle_onednn PRIVATE DNNL::dnnl OpenMP::OpenMP_CXX)
add_dependencies(heddle heddle_onednn)
