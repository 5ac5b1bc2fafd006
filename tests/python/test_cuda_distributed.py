"""Attention over GPUs. cuda_ranks.py runs them, over NCCL where there are two; here stands what came of each case."""

import pytest

torch = pytest.importorskip("torch")

from heddle import _heddle  # noqa: E402

if not (_heddle.cuda_built() and torch.cuda.is_available()):
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

import cuda_ranks  # noqa: E402
import distributed_ranks  # noqa: E402

_CASES = [(world, name) for world, (_, checks) in cuda_ranks.worlds().items() for name in checks]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return distributed_ranks.results_of(cuda_ranks.__file__, tmp_path_factory.mktemp("ranks") / "results.json")


@pytest.mark.parametrize(("world", "name"), _CASES)
def test_ranks_are_one_process(results, world, name):
    distributed_ranks.check_world(results, world, name)
