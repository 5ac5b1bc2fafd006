"""Attention over several processes. distributed_ranks.py runs them, all at once; here stands what came of each case, and what needs no
process."""

import re
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import distributed_ranks  # noqa: E402
import heddle  # noqa: E402
import heddle.distributed as hd  # noqa: E402
from heddle.distributed.keys import FORWARD, count_of_parts, parts_for_memory, parts_of_heads  # noqa: E402
from heddle.distributed.pieces import Layout  # noqa: E402
from heddle.distributed.ranks import Ranks  # noqa: E402

_CASES = [(world, name) for world, (_, checks) in distributed_ranks.worlds().items() for name in checks]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return distributed_ranks.results_of(distributed_ranks.__file__, tmp_path_factory.mktemp("ranks") / "results.json")


@pytest.mark.parametrize(("world", "name"), _CASES)
def test_ranks_are_one_process(results, world, name):
    distributed_ranks.check_world(results, world, name)


def test_shards_are_the_whole():
    plan = hd.plan(37, 3, heads=2, head_size=8, causal="top_left", cu_seqlens=[0, 5, 37], order="balanced")
    x = torch.randn(2, 37, 3)
    parts = [hd.shard(x, plan, rank) for rank in range(3)]
    assert [part.shape[1] for part in parts] == [plan.rows_of(rank) for rank in range(3)]
    assert torch.equal(hd.unshard(parts, plan), x)
    assert np.array_equal(plan.permutation()[plan.inverse()], np.arange(37))
    ids = hd.unshard([torch.from_numpy(plan.position_ids(rank)) for rank in range(3)], plan, dim=0)
    assert ids.tolist() == [*range(5), *range(32)]


def test_a_plan_of_one_rank_needs_no_group():
    q = torch.randn(9, 2, 8, requires_grad=True)
    plan = hd.plan(9, 1, heads=2, head_size=8, causal="top_left")
    for scheme in ("auto", "gather", "ring", "needed", "ulysses", "2d"):
        out = hd.attention(q, q, q, plan=plan, scheme=scheme)
        (dq,) = torch.autograd.grad(out.square().sum(), q)
        own = heddle.attention(q[None], q[None], q[None], causal="top_left")[0]
        assert torch.allclose(out, own, atol=1e-6)
        assert torch.allclose(dq, torch.autograd.grad(own.square().sum(), q)[0], atol=1e-5)


@pytest.mark.parametrize(
    "backends, device, told",
    [
        ({"cpu": "gloo"}, "cpu", None),
        ({"cuda": "nccl"}, "cuda", None),
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", "gloo"),  # it has no sends for GPUs
        ({"cuda": "nccl"}, "cpu", "none"),
    ],
)
def test_a_group_that_does_not_carry_the_device_is_told_of(backends, device, told):
    class Group:
        def _get_backend(self, device):
            if device.type not in backends:
                raise RuntimeError("no backend")
            return mock.Mock(name="backend", **{"name.return_value": backends[device.type]})

    ranks = Ranks("distributed.attention", None, None, None)
    ranks.group, ranks.size = Group(), 2
    if told is None:
        ranks.serve(torch.device(device))
        return
    words = f"tensors are on {device}, which the group does not carry (its backend for them: {told})"
    with pytest.raises(ValueError, match=re.escape(words)):
        ranks.serve(torch.device(device))


def test_costs_choose_the_scheme():
    options = dict(heads=32, kv_heads=8, head_size=128, causal="top_left")
    near = hd.plan(16384, 2, **options)
    far = hd.plan(16384, 2, costs=hd.Costs(link_bandwidth=5e9), **options)
    assert far.scheme == "ring" and far.digest == near.digest
    assert near.cost("gather").forward_bytes == 16384 * 8 * 128 * 2
    assert far.cost("ring").forward_seconds > near.cost("ring").forward_seconds
    assert [plan.scheme for plan in (near, far)].count("ring") >= 1
    eight = hd.plan(16384, 8, **options)
    assert (near.ulysses, eight.ulysses, hd.plan(16384, 8, ulysses=2, **options).ulysses) == (2, 4, 2)
    assert eight.across in ("needed", "ring")
    assert hd.plan(64000, 8, cu_seqlens=range(0, 64001, 1600), **options).scheme == "needed"
    hosts = hd.plan(131072, 16, costs=hd.Costs(ranks_per_host=8), **options)
    one_host = hd.plan(131072, 16, **options)
    assert hosts.cost("gather").forward_seconds > 1.1 * one_host.cost("gather").forward_seconds
    assert hosts.scheme in ("ring", "2d") and hosts.cost("gather").forward_seconds > hosts.cost("2d").forward_seconds
    assert str(near).startswith("Plan(16384 rows, 2 ranks, zigzag, balance 1.000, digest ")


_plan = hd.plan(8, 2, heads=4, head_size=8)
_one = hd.plan(4, 1, heads=4, head_size=8)
_q = torch.zeros(1, 4, 4, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: hd.plan(8, 0, heads=4, head_size=8), ValueError, "[distributed.plan] ranks is 0: it must be from 1 to 4096"),
        (lambda: hd.plan(8, 2.5, heads=4, head_size=8), TypeError, "[distributed.plan] ranks is 2.5: it must be an int"),
        (
            lambda: hd.plan(8, 2, heads=4, head_size=8, order="zag"),
            ValueError,
            "[distributed.plan] order is 'zag': it must be one of contiguous, zigzag, striped, per_document, balanced",
        ),
        (
            lambda: hd.plan(8, 2, heads=4, head_size=8, dtype="int8"),
            ValueError,
            "[distributed.plan] dtype is 'int8': it must be one of float32, float16, bfloat16",
        ),
        (
            lambda: hd.plan(8, 2, heads=4, head_size=8, areas=[(0, 4)]),
            ValueError,
            "[distributed.plan] areas[0] has 2 items: it must be (q_begin, q_end, key_begin, key_end), and causal and window behind",
        ),
        (
            lambda: hd.plan(8, 4, heads=4, head_size=8, ulysses=3),
            ValueError,
            "[distributed.plan] ulysses is 3: it must divide the ranks, 4, or be 0",
        ),
        (lambda: _plan.rows_of(2), ValueError, "[distributed.plan] rank is 2: it must be from 0 to 1"),
        (
            lambda: hd.attention(_q, _q, _q, plan=_plan),
            ValueError,
            "[distributed.attention] the plan is for 2 ranks and torch.distributed has no process group",
        ),
        (
            lambda: hd.attention(_q[:, :3], _q, _q, plan=_one),
            ValueError,
            "[distributed.attention] q is [1, 3, 4, 8]: rank 0 of the plan has 4 rows",
        ),
        (
            lambda: hd.attention(_q, _q.half(), _q, plan=_one),
            ValueError,
            "[distributed.attention] k is torch.float16: q, k and v must have one dtype",
        ),
        (
            lambda: hd.attention(_q, _q[:, :, :3], _q[:, :, :3], plan=_one),
            ValueError,
            "[distributed.attention] q is [1, 4, 4, 8], k [1, 4, 3, 8] and v [1, 4, 3, 8]: they must be",
        ),
        (
            lambda: hd.attention(_q.to("meta"), _q, _q, plan=_one),
            ValueError,
            "[distributed.attention] q is on meta: over several processes it must be on the CPU or a CUDA GPU",
        ),
        (
            lambda: hd.attention(_q, _q, _q, plan=_one, sink=torch.zeros(3)),
            ValueError,
            "[distributed.attention] sink is torch.float32 [3] on cpu: it must be float32 [H], [4], on cpu",
        ),
        (
            lambda: hd.attention(_q, _q, _q, plan=_one, bias=torch.zeros(1, 4, 4, 5)),
            ValueError,
            "[distributed.attention] bias is torch.float32 [1, 4, 4, 5] on cpu: it must be [B or 1, H or 1, rows, S], [1 or 1, 4 or 1, 4, 4], float32 or",
        ),
        (
            lambda: hd.attention(_q, _q, _q, plan=_one, bias=torch.zeros(1, 1, 4, 4), scheme="ulysses"),
            ValueError,
            "[distributed.attention] bias is given and scheme is 'ulysses': it must be \"gather\", \"ring\" or \"needed\"",
        ),
        (
            lambda: hd.attention(_q, _q, _q, plan=hd.plan(4, 1, heads=4, head_size=8, cu_seqlens=[0, 2, 4]), bias=torch.zeros(1, 1, 4, 4)),
            ValueError,
            "[distributed.attention] bias is given and the plan has documents: it must have one document, in runs of rows",
        ),
        (
            lambda: hd.attention(_q, _q, _q, plan=hd.plan(4, 1, heads=4, head_size=8, order="striped"), bias=torch.zeros(1, 1, 4, 4)),
            ValueError,
            "[distributed.attention] bias is given and the plan has order 'striped': it must have one document, in runs of rows",
        ),
        (
            lambda: hd.attention(_q, _q, _q, plan=_one, scheme="all"),
            ValueError,
            "[distributed.attention] scheme is 'all': it must be one of auto, gather, ring, needed, ulysses, 2d",
        ),
        (
            lambda: hd.attention(_q, _q, _q, plan=_one, causal="top_left"),
            ValueError,
            "[distributed.attention] causal is given: the plan has causality, window and documents; say it to plan()",
        ),
        (
            lambda: hd.attention(_q, _q, _q, plan=_one, dropout_p=0.1),
            ValueError,
            "[distributed.attention] dropout_p is given: served are scale, softcap, alibi_slopes, bias, sink, return_lse, deterministic and chunked",
        ),
        (lambda: hd.attention(_q, _q, _q, plan=_one, speed=1), TypeError, "unexpected keyword argument 'speed'"),
        (
            lambda: hd.attention(_q, _q, _q, plan=_one, timeout=0),
            ValueError,
            "[distributed.attention] timeout is 0: it must be above 0 seconds, or None",
        ),
        (lambda: hd.shard(_q, _plan, 0), ValueError, "[distributed.shard] x is [1, 4, 4, 8]: extent 1 must be the plan's rows, 8"),
        (lambda: hd.unshard([_q], _plan), ValueError, "[distributed.unshard] x has 1 tensors: there must be one for each of 2"),
        (
            lambda: hd.unshard([_q, _q[:, :3]], _plan),
            ValueError,
            "[distributed.unshard] x is [1, 3, 4, 8]: extent 1 must be the 4 rows of rank 1",
        ),
        (
            lambda: hd.unshard([_q, _q.clone().requires_grad_()], _plan),
            ValueError,
            "[distributed.unshard] x requires a gradient, which ends here: give x.detach()",
        ),
    ],
)  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def test_heads_go_in_parts_where_there_is_work_for_them():
    """Of 8 key heads: some 100 ms of products in each part, or as many parts as save memory."""
    q, k = torch.empty(1, 0, 32, 128), torch.empty(1, 0, 8, 128)
    for pairs, chunked, count in (
        (1e8, False, 1),
        (1e8, True, 8),
        (1e10, False, 2),
        (3e10, False, 4),
        (1e12, False, 8),
    ):
        layout = Layout([0, 0], [], True, 0, [], pairs=pairs)
        most = parts_for_memory(layout, q, k, k, FORWARD, chunked)
        parts = parts_of_heads(q, k, count_of_parts(k, most))
        assert len(parts) == count, (pairs, chunked, most)
        assert [part.kv_heads.start for part in parts] == [n * 8 // count for n in range(count)]
        assert all(part.width(of_keys=False) == 4 * part.width(of_keys=True) for part in parts)
