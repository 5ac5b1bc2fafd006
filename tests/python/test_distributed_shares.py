"""What ranks are to send each other, found by each for itself."""

import numpy as np
import pytest

pytest.importorskip("torch")

import heddle.distributed as hd  # noqa: E402
import torch  # noqa: E402
from distributed_ranks import Case, attends  # noqa: E402
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


def _most_sent(layouts, first=None):
    """Rows of keys, inside of hosts of two ranks and across them: all, or those that are in first pieces, or that are not."""
    ranks = range(len(layouts))
    rows = np.zeros((2, len(layouts), 2))
    for to in ranks:
        for source in set(ranks) - {to}:
            share = layouts[to].shares[source]
            lengths = [len(share.places)] if share.into is None else [run.stop - run.start for run in share.into]
            moved = sum(n for n, early in zip(lengths, share.first_into) if first is None or early is first)
            rows[0, source, source // 2 != to // 2] += moved
            rows[1, to, source // 2 != to // 2] += moved
    return rows.max((0, 1))


@pytest.mark.parametrize("scheme", ["gather", "needed"])
@pytest.mark.parametrize("order", ["zigzag", "contiguous", "striped", "balanced"])
def test_predictions_are_of_what_is_sent(order, scheme):
    """Exchanges of so many rows, and a first piece of so many pairs beside the second one."""
    costs, found = hd.Costs(link_latency=1e-12, link_bandwidth=1e14, ranks_per_host=2, network_bandwidth=5e13), []
    forward, backward = 2 * 2 * 16 / costs.forward_flops, 2 * 2 * 40 / costs.backward_flops  # s of a pair
    for mask in _MASKS:
        plan = hd.plan(611, 3, heads=2, head_size=8, order=order, costs=costs, **mask)
        layouts = [layout_of(plan, rank, scheme, _CPU) for rank in range(3)]
        seen = attends(Case("", 611, mask)).numpy()

        def seconds(rows, bytes_of_element=2):
            taken = rows * 2 * 16 * bytes_of_element / (costs.link_bandwidth, costs.network_bandwidth)
            return costs.link_latency + taken.max() if rows.any() else 0

        first, rest, gradients = (
            seconds(_most_sent(layouts, True)), seconds(_most_sent(layouts, False)), seconds(_most_sent(layouts), 4)
        )  # fmt: skip
        work = plan.pairs(max(range(3), key=plan.pairs))
        one = seconds(_most_sent(layouts)) + np.array([work * forward, work * backward + gradients])
        two = np.zeros(2)
        for rank, layout in enumerate(layouts):
            keys = np.arange(611) if scheme == "gather" else np.frombuffer(plan._native.needed_keys(rank), np.int64)
            piece = layout.steps[0][0]
            pairs = seen[plan.rows_of_rank(rank).numpy()[piece.rows]][:, keys[piece.keys]].sum()
            in_place = all(share.into is not None for r, share in enumerate(layout.shares) if r != rank)
            hidden = [min(pairs * forward, rest) * (in_place and layout.whole), min(pairs * backward, rest) * in_place]
            two = np.maximum(
                two, first + rest + plan.pairs(rank) * np.array([forward, backward]) - hidden + [0, gradients]
            )
        split = rest > 0 and two.sum() < one.sum() * (1 - 1e-9)
        found.append(split)
        assert layouts[0].splits_keys == split, mask
        cost = plan.cost(scheme)
        assert np.allclose([cost.forward_seconds, cost.backward_seconds], two if split else one, rtol=1e-9), mask
    assert any(found) or order != "zigzag"
