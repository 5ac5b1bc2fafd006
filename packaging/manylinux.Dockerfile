# Wheels for any Linux with glibc 2.28 or later: scripts/wheels.sh in PyPA's image (AlmaLinux 8). From the root of the sources:
#
#   docker build -f packaging/manylinux.Dockerfile --output dist .
#   docker build -f packaging/manylinux.Dockerfile --output dist --build-arg KINDS="cpu cuda" .
#   docker build -f packaging/manylinux.Dockerfile --output dist --build-arg ARCH=aarch64 .   # on Arm; the CPU alone
ARG ARCH=x86_64
FROM quay.io/pypa/manylinux_2_28_${ARCH} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

ARG KINDS=cpu
ARG CUDA=13-0
RUN if [[ " $KINDS " == *" cuda "* ]]; then \
      dnf install -y dnf-plugins-core; \
      dnf config-manager --add-repo https://developer.download.nvidia.com/compute/cuda/repos/rhel8/x86_64/cuda-rhel8.repo; \
      dnf install -y cuda-{nvcc,cudart-devel,cccl}-$CUDA; \
    fi

# CMake 4 refuses the build files of the libraries below.
ENV PATH=/usr/local/cuda/bin:/opt/python/cp312-cp312/bin:$PATH
RUN pip install 'cmake>=3.25,<4' ninja

# What AlmaLinux has no packages of, in the versions of Debian 12, which `make test` compiles with; their licences where
# scripts/wheels.sh looks for them.
RUN add() { \
      git clone --depth 1 --branch "$3" "$2" /tmp/source; \
      cmake -S /tmp/source -B /tmp/source/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_TESTING=OFF "${@:4}"; \
      cmake --build /tmp/source/build; \
      cmake --install /tmp/source/build; \
      mkdir -p "/usr/share/doc/$1"; \
      cat /tmp/source/LICENSE* >"/usr/share/doc/$1/copyright"; \
      rm -rf /tmp/source; \
    }; \
    add libhwy-dev https://github.com/google/highway 1.0.3 -DHWY_ENABLE_EXAMPLES=OFF -DHWY_ENABLE_CONTRIB=OFF; \
    add nlohmann-json3-dev https://github.com/nlohmann/json v3.11.2 -DJSON_BuildTests=OFF; \
    add libcli11-dev https://github.com/CLIUtils/CLI11 v2.1.2 -DCLI11_BUILD_TESTS=OFF -DCLI11_BUILD_EXAMPLES=OFF

COPY . /heddle
WORKDIR /heddle
# Without the module over oneDNN, which AlmaLinux 8 has no package of: float layers of the encoder on the CPU are refused.
RUN HEDDLE_ONEDNN=OFF PYTHON=python3.12 \
    PYTHONS="/opt/python/cp310-cp310/bin/python /opt/python/cp311-cp311/bin/python /opt/python/cp312-cp312/bin/python" \
    scripts/wheels.sh $KINDS

FROM scratch
COPY --from=build /heddle/dist /
