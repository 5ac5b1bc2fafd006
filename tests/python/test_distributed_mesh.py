"""Attention over a dimension of a device mesh, beside FSDP2. mesh_ranks.py runs it; here stands what came of each case."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import distributed_ranks  # noqa: E402
import mesh_ranks  # noqa: E402

_CASES = [(world, name) for world, (_, checks) in mesh_ranks.worlds().items() for name in checks]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return distributed_ranks.results_of(mesh_ranks.__file__, tmp_path_factory.mktemp("ranks") / "results.json")


@pytest.mark.parametrize(("world", "name"), _CASES)
def test_ranks_are_one_process(results, world, name):
    distributed_ranks.check_world(results, world, name)
