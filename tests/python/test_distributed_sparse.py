"""Attention over lists of blocks, and native sparse attention, over processes. sparse_ranks.py runs them; here stands what came of each
case, and what needs no process."""

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import distributed_ranks  # noqa: E402
import heddle.distributed as hd  # noqa: E402
import sparse_ranks  # noqa: E402

_CASES = [(world, name) for world, (_, checks) in sparse_ranks.worlds().items() for name in checks]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return distributed_ranks.results_of(sparse_ranks.__file__, tmp_path_factory.mktemp("ranks") / "results.json")


@pytest.mark.parametrize(("world", "name"), _CASES)
def test_ranks_are_one_process(results, world, name):
    distributed_ranks.check_world(results, world, name)


def _plan(**options):
    return hd.plan(20, 1, heads=4, head_size=8, **{"causal": "top_left", **options})


_one = _plan()
_q = torch.randn(1, 20, 4, 8)
_gate = torch.rand(1, 20, 4)
_blocks = torch.zeros(1, 20, 1, 2, dtype=torch.int32)


def _lists(blocks=_blocks, *counts, q=_q, plan=_one, block_size=16, **options):
    return hd.sparse_attention(q, q, q, blocks, *counts, plan=plan, block_size=block_size, **options)


def _nsa(q=_q, gate=_gate, plan=_one, block_size=16, **options):
    return hd.parallel_nsa(q, q, q, gate, gate, None, None, 2, block_size, plan=plan, **options)


def test_neither_is_traced():
    for call in (_lists, _nsa):
        assert torch.equal(torch.compile(lambda call=call: call() + 1, backend="eager")(), call() + 1)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(lambda call=call: call() + 1, backend="eager", fullgraph=True)()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: _lists(plan=4), TypeError, "[distributed.sparse_attention] plan is a int: it must be of heddle.distributed.plan"),
        (
            lambda: _lists(plan=_plan(cu_seqlens=[0, 7, 20])),
            ValueError,
            "[distributed.sparse_attention] the plan has 2 documents: lists of blocks over ranks are of one sequence",
        ),
        (lambda: _lists(plan=_plan(causal="none", areas=[(0, 4, 0, 4)])), ValueError, "[distributed.sparse_attention] the plan has areas: lists"),
        (lambda: _lists(_blocks.long()), ValueError, "[distributed.sparse_attention] blocks is torch.int64 on cpu: it must be int32"),
        (lambda: _lists(block_size=48), ValueError, "[distributed.sparse_attention] block_size is 48: it must be 16, 32, 64 or 128"),
        (lambda: _lists(query_rows=0), ValueError, "[distributed.sparse_attention] query_rows is 0: it must be at least 1"),
        (
            lambda: _lists(query_rows=4),
            ValueError,
            "[distributed.sparse_attention] blocks is [1, 20, 1, 2]: rank 0's 5 lists must be [1, 5, L, n]",
        ),
        (
            lambda: _lists(_blocks, _blocks[:, :3, :, 0]),
            ValueError,
            "[distributed.sparse_attention] counts is [1, 3, 1]: rank 0's 20 lists must be [1, 20, L]",
        ),
        (
            lambda: _lists(mask_ids=_blocks[..., :1], masks=_blocks[0, :1, :, :1]),
            ValueError,
            "[distributed.sparse_attention] mask_ids is [1, 20, 1, 1]: rank 0's 20 lists must be of blocks' shape, [1, 20, 1, 2]",
        ),
        (
            lambda: _lists(_blocks.flatten(), offsets=_blocks[:, :20, :, 0].transpose(1, 2)),
            ValueError,
            "[distributed.sparse_attention] offsets is [1, 1, 20] and blocks [40]: rank 0's 20 lists must be [1, L, 21] and [entries]",
        ),
        (lambda: _lists(q=_q[0]), ValueError, "[distributed.sparse_attention] q is [20, 4, 8]: it must be [B, rows, H, D]"),
        (lambda: _lists(q=_q[:, 1:]), ValueError, "[distributed.sparse_attention] q is [1, 19, 4, 8]: rank 0 of the plan has 20 rows"),
        (lambda: _lists(dropout_p=0.1), TypeError, "unexpected keyword argument 'dropout_p'"),
        (
            lambda: _nsa(plan=_plan(causal="none")),
            ValueError,
            "[distributed.parallel_nsa] the plan is not causal and has window (-1, -1): native sparse attention is causal",
        ),
        (
            lambda: _nsa(plan=_plan(window=(4, 0))),
            ValueError,
            "[distributed.parallel_nsa] the plan is causal and has window (4, 0): native sparse attention is causal, and says",
        ),
        (lambda: _nsa(plan=_plan(cu_seqlens=[0, 7, 20])), ValueError, "[distributed.parallel_nsa] the plan has 2 documents"),
        (lambda: _nsa(block_size=20), ValueError, "[distributed.parallel_nsa] block_size is 20: it must be 16, 32, 64 or 128"),
        (lambda: _nsa(gate=_gate[:, 1:]), ValueError, "[distributed.parallel_nsa] g_cmp"),
        (lambda: _nsa(window_size=4), (ValueError, TypeError), "[distributed.parallel_nsa] g_swa"),
        (lambda: _nsa(query_stride=4), TypeError, "unexpected keyword argument 'query_stride'"),
    ],
)  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
