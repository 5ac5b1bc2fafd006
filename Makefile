# The habits. Each is one line over the CMake presets and scripts/.
ACCURACY ?= 1e-2
BUDGET ?= 570

.PHONY: demo demo-sparse test test-ranks test-gpu soak-gpu stage bench bench-gpu wheels docs format setup

demo: ## build, run the encoder, in low-bit formats too, and the sweeps, write report/index.html and lowbit.html; ACCURACY: relative error allowed; BUDGET: seconds to measure for, after the build
	scripts/demo.sh --accuracy $(ACCURACY) --budget $(BUDGET)

demo-sparse: ## build, measure native sparse attention beside dense attention and layers of adaptive sparse attention beside the public ones, write report/sparse.html and asam.html; BUDGET as above, for each
	scripts/demo.sh --sparse --budget $(BUDGET)

test: ## build from clean and run every test, C++ and Python
	scripts/test.sh

test-ranks: ## attention over several processes on the CPU: every case, number of ranks, scheme and transport
	scripts/test_ranks.sh

test-gpu: ## the tests that need a GPU, also under compute-sanitizer; SHARD=i/n runs a part
	scripts/test_gpu.sh

soak-gpu: ## every GPU kernel's calls again and again, in the search for rows that change; planted faults first; SECONDS_TO_SOAK, SHARD=i/n
	scripts/soak_gpu.sh

stage: ## build/stage, to be copied to a machine with a GPU and no compiler
	scripts/stage.sh

wheels: ## binary wheels that need no compiler, in dist/cpu and, where there is an nvcc, dist/cuda; those of dist/cpu are installed and tried
	scripts/wheels.sh

bench: ## benchmarks against torch and OpenBLAS; never part of the tests
	scripts/bench.sh

bench-gpu: ## benchmarks on a GPU against what torch brings, and FlashAttention-3 where it can be imported; SHARD=i/n runs a part
	scripts/bench_gpu.sh

docs: ## build/docs/index.html, a site of the pages with the reference of Python, C++ and the command, after a build; warnings are errors
	scripts/docs.sh

format: ## clang-format over the C++ and CUDA sources, ruff over Python's
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format -i

setup: ## install what the others need
	scripts/setup.sh
