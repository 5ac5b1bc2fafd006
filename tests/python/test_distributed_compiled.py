"""Attention over processes under torch.compile. compiled_ranks.py runs it; here stands what came of each case, and what needs no process."""

import gc

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import compiled_ranks  # noqa: E402
import distributed_ranks  # noqa: E402
import heddle.distributed as hd  # noqa: E402
from torch._dynamo.testing import CompileCounter  # noqa: E402

_CASES = [(world, name) for world, (_, checks) in compiled_ranks.worlds().items() for name in checks]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return distributed_ranks.results_of(compiled_ranks.__file__, tmp_path_factory.mktemp("ranks") / "results.json")


@pytest.mark.parametrize(("world", "name"), _CASES)
def test_compiled_is_uncompiled(results, world, name):
    distributed_ranks.check_world(results, world, name)


def _plan(**options):
    return hd.plan(9, 1, heads=2, head_size=8, **options)


def test_plans_that_are_the_same_are_traced_once():
    q = torch.randn(1, 9, 2, 8)
    counter = CompileCounter()
    call = torch.compile(lambda q, plan: hd.attention(q, q, q, plan=plan), backend=counter, fullgraph=True)
    full, causal = (hd.attention(q, q, q, plan=_plan(causal=causal)) for causal in ("none", "top_left"))
    first, second = _plan(), _plan()
    assert torch.equal(call(q, first), full)
    del first  # the second has its handle, and lives
    gc.collect()
    assert torch.equal(call(q, second), full) and counter.frame_count == 1
    assert torch.equal(call(q, _plan(causal="top_left")), causal) and counter.frame_count == 2
    slow = _plan(costs=hd.Costs(link_bandwidth=1e9))
    assert slow.digest == second.digest and slow.handle != second.handle  # "auto" may be another scheme


def test_a_plan_that_is_gone_is_named():
    q = torch.randn(1, 9, 2, 8, requires_grad=True)
    plan = _plan(window=(3, 1))
    digest = plan.digest
    call = torch.compile(lambda q, plan: hd.attention(q, q, q, plan=plan), backend="eager", fullgraph=True)
    out = call(q, plan)
    del plan
    gc.collect()
    with pytest.raises(RuntimeError) as caught:
        out.sum().backward()
    assert f"[distributed.plan] the plan {digest} of a compiled call is gone: keep it until" in str(caught.value)
