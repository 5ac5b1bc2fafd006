"""What ranks are to send each other, found by each for itself."""

import pytest

pytest.importorskip("torch")

import heddle.distributed as hd  # noqa: E402
import torch  # noqa: E402
from heddle.distributed.pieces import layout_of  # noqa: E402

_CPU = torch.device("cpu")
_MASKS = [
    {},
    {"causal": "top_left"},
    {"causal": "top_left", "window": (37, 0)},
    {"causal": "top_left", "cu_seqlens": [0, 3, 3, 130, 131, 200, 611]},
    {"areas": [(0, 611, 0, 20), (100, 611, 100, 611, "top_left")]},
]


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("scheme", ["gather", "needed"])
@pytest.mark.parametrize("order", ["zigzag", "contiguous", "striped", "balanced"])
@pytest.mark.parametrize("mask", _MASKS, ids=["full", "causal", "window", "documents", "areas"])
def test_who_sends_says_what_who_receives_says(mask, order, scheme, ranks):
    try:
        plan = hd.plan(611, ranks, heads=2, head_size=8, order=order, **mask)
    except ValueError:
        pytest.skip("no such order for this mask")
    layouts = [layout_of(plan, rank, scheme, _CPU) for rank in range(ranks)]
    assert len({layout.pairs for layout in layouts}) == 1  # from which follows how heads are parted
    for sender, mine in enumerate(layouts):
        for receiver, theirs in enumerate(layouts):
            out, into = mine.shares[receiver], theirs.shares[sender]
            assert len(out.given) == len(into.places)
            assert out.first_out_of == into.first_into
            assert (out.out_of is None) == (into.into is None)
            lengths = [[run.stop - run.start for run in runs or []] for runs in (out.out_of, into.into)]
            assert lengths[0] == lengths[1]
            if out.out_of is not None:
                assert [n for run in out.out_of for n in range(run.start, run.stop)] == out.given.tolist()
                assert [n for run in into.into for n in range(run.start, run.stop)] == into.places.tolist()


def test_first_pieces_keys_come_first():
    """Of two ranks the first has the first and last quarter, and its first quarter needs none of the other's keys."""
    plan = hd.plan(400, 2, heads=2, head_size=8, causal="top_left")
    first, second = (layout_of(plan, rank, "needed", _CPU) for rank in range(2))
    assert [piece.rows for piece in first.steps[0]] == [slice(0, 100), slice(100, 200)]
    assert first.shares[1].into == [slice(100, 300)] and first.shares[1].first_into == [False]
    assert second.shares[0].into == [slice(0, 100)] and second.shares[0].first_into == [True]


def test_keys_come_in_two_exchanges_where_that_is_faster():
    shape = dict(heads=64, kv_heads=8, head_size=128, causal="top_left")
    for ranks, found in ((2, True), (8, True), (16, False)):
        plan = hd.plan(8192 * ranks, ranks, costs=hd.Costs(ranks_per_host=8), **shape)
        assert {layout_of(plan, rank, "needed", _CPU).splits_keys for rank in (0, ranks - 1)} == {found}
    assert not layout_of(hd.plan(16384, 2, batch=2, **shape), 0, "needed", _CPU).splits_keys
    assert not layout_of(hd.plan(16384, 2, order="striped", **shape), 0, "gather", _CPU).splits_keys
