"""Conan 2 recipe of the C++ library, over the sources that it stands in: conan create packaging/conan --build=missing"""

import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load

SOURCES = os.path.join("..", "..")


class Heddle(ConanFile):
    name = "heddle"
    description = "Attention for Transformers, exact, forward and backward, and linear layers in 8 and 4 bits, on CPUs and NVIDIA GPUs"
    license = "Apache-2.0"
    topics = ("attention", "transformers", "quantization", "cuda", "simd")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "fPIC": [True, False], "cuda": [True, False], "onednn": [True, False]}
    default_options = {"shared": False, "fPIC": True, "cuda": False, "onednn": False}
    implements = ["auto_shared_fpic"]

    def set_version(self):
        lists = load(self, os.path.join(self.recipe_folder, SOURCES, "CMakeLists.txt"))
        self.version = re.search(r"project\(heddle VERSION ([0-9.]+)", lists)[1]

    def export_sources(self):
        root = os.path.join(self.recipe_folder, SOURCES)
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*"):
            copy(self, pattern, root, self.export_sources_folder)

    def requirements(self):
        self.requires("highway/1.0.3")
        self.requires("nlohmann_json/3.11.2")
        if self.options.onednn:
            self.requires("onednn/[>=2.6]")  # of the system, or of a remote that has it

    def validate(self):
        check_min_cppstd(self, 20)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        for part in ("TESTS", "CLI", "BENCH", "EXAMPLES"):
            toolchain.cache_variables[f"HEDDLE_BUILD_{part}"] = "OFF"
        toolchain.cache_variables["HEDDLE_EMU128"] = "OFF"
        toolchain.cache_variables["HEDDLE_CUDA"] = "ON" if self.options.cuda else "OFF"
        toolchain.cache_variables["HEDDLE_ONEDNN"] = "ON" if self.options.onednn else "OFF"
        toolchain.generate()
        dependencies = CMakeDeps(self)
        dependencies.set_property("highway", "cmake_file_name", "hwy")
        dependencies.set_property("highway::hwy", "cmake_target_name", "hwy::hwy")
        dependencies.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        CMake(self).install()

    def package_info(self):  # heddleConfig.cmake is the library's own
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs.append(os.path.join("lib", "cmake", "heddle"))
        self.cpp_info.libs = ["heddle"]
        self.cpp_info.system_libs = ["pthread", "dl", "m"]
