# The matrix library of the encoder's linear layers. Attention does not need it.
option(HEDDLE_ONEDNN "Linear layers of the encoder by oneDNN" ON)
if(HEDDLE_ONEDNN)
  find_package(dnnl CONFIG REQUIRED)
  find_package(OpenMP REQUIRED COMPONENTS CXX)  # the runtime oneDNN is threaded with, to keep it at one thread
  target_sources(heddle PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/model/onednn/linear.cc)
  target_link_libraries(heddle PRIVATE DNNL::dnnl OpenMP::OpenMP_CXX)
else()
  target_sources(heddle PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/stubs/linear.cc)
endif()
