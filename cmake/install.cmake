# cmake --install: headers, library, CMake package, pkg-config file. All paths are relative to the prefix.
option(HEDDLE_INSTALL "Install the library, its headers and its CMake package" ${PROJECT_IS_TOP_LEVEL})
if(NOT HEDDLE_INSTALL)
  return()
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(heddle_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/heddle)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/heddle DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
set(heddle_installed heddle)
if(HEDDLE_ONEDNN)
  list(APPEND heddle_installed heddle_onednn)
endif()
if(HEDDLE_MPI_FOUND)
  list(APPEND heddle_installed heddle_mpi)
endif()
if(HEDDLE_NCCL_FOUND)
  list(APPEND heddle_installed heddle_nccl)
endif()
install(TARGETS ${heddle_installed} EXPORT heddleTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT heddleTargets NAMESPACE heddle:: DESTINATION ${heddle_cmake_dir})

if(TARGET heddle_cli)  # finds a shared library beside it, wherever the prefix is
  file(RELATIVE_PATH heddle_bin_to_lib "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")
  set_target_properties(heddle_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${heddle_bin_to_lib}")
endif()

# What a program that links the static library must find besides; a shared one carries it itself.
get_target_property(heddle_type heddle TYPE)
set(heddle_dependencies "find_dependency(Threads)\n")
set(heddle_pc_libs "-lheddle")
set(heddle_pc_libs_private "-lstdc++ -lm -pthread -ldl")
if(heddle_type STREQUAL STATIC_LIBRARY AND HEDDLE_CUDA_FOUND)
  string(APPEND heddle_dependencies "find_dependency(CUDAToolkit)\n")
  string(APPEND heddle_pc_libs_private " -lcudart_static -lrt")  # from wherever CUDA is on that machine
endif()
if(HEDDLE_MPI_FOUND)  # of heddle::mpi alone: who does not link it needs none
  string(APPEND heddle_dependencies "find_package(MPI QUIET COMPONENTS CXX)\n")
endif()
if(HEDDLE_NCCL_FOUND)  # of heddle::nccl alone
  string(APPEND heddle_dependencies "list(APPEND CMAKE_MODULE_PATH \${CMAKE_CURRENT_LIST_DIR})\nfind_package(NCCL QUIET)\n")
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake DESTINATION ${heddle_cmake_dir})
endif()
# pkg-config asks for Libs.private only with --static, which would also ask for a static C library.
if(heddle_type STREQUAL STATIC_LIBRARY)
  string(APPEND heddle_pc_libs " ${heddle_pc_libs_private}")
  set(heddle_pc_libs_private "")
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/heddleConfig.cmake.in
  ${PROJECT_BINARY_DIR}/heddleConfig.cmake INSTALL_DESTINATION ${heddle_cmake_dir}
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/heddleConfigVersion.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/heddleConfig.cmake ${PROJECT_BINARY_DIR}/heddleConfigVersion.cmake
  DESTINATION ${heddle_cmake_dir})

# ${pcfiledir} keeps the file true when the prefix moves.
file(RELATIVE_PATH heddle_pc_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" heddle_pc_prefix "${heddle_pc_prefix}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/heddle.pc.in ${PROJECT_BINARY_DIR}/heddle.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/heddle.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
