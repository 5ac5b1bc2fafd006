"""Which pattern each head gets, of several: the cheapest that is near enough."""

import heddle
import numpy as np
import pytest
import torch
from heddle import patterns
from heddle.patterns import (
    attention,
    by_head,
    local,
    parse,
    sink,
)


def of_different_heads():
    """Heads that look at the first keys, at their neighbours, at both ends, and at everything."""
    q, k, v = torch.randn(3, 2, 300, 4, 16, generator=torch.Generator().manual_seed(0)).unbind()
    k[:, :4, 0], q[:, :, 0] = 4, 3 * q[:, :, 0].abs()
    angle = torch.arange(300) / 6
    q[:, :, 1, :2] = k[:, :, 1, :2] = 9 * torch.stack([angle.cos(), angle.sin()], -1)
    ramp = torch.arange(300) / 300
    q[:, :, 1, 2], k[:, :, 1, 2] = 100.0, 8 * ramp  # the latest of those
    k[:, :4, 2], q[:, :, 2] = 4, 3 * q[:, :, 2].abs()
    q[:, :, 2, 0], k[:, :, 2, 0] = 20.0, torch.where(ramp < 4 / 300, 4.0, 2 * ramp)
    return q, k, v


@pytest.mark.parametrize("of_numpy", [False, True])
def test_each_head_has_the_cheapest_pattern_that_is_near_enough(of_numpy):
    q, k, v = of_different_heads()
    candidates = ["sink(4)", "local(40, 0)", sink(16) | local(90, 0), "sink(4) | local(200, 0)"]
    sizes = dict(causal=True, block_size=16, query_rows=16)
    operands = [x.numpy() for x in (q, k, v)] if of_numpy else [q.requires_grad_(), k, v]
    choice = patterns.per_head(*operands, candidates, 0.02, rows=40, quantile=1.0, **sizes)
    exact = heddle.attention(q, k, v, causal="top_left").detach()
    longest = v.norm(dim=-1).amax(1)
    cost = {str(parse(str(x))): parse(str(x)).kept(300, **sizes).tiles for x in candidates}
    drawn = np.sort(np.random.default_rng(0).integers(600, size=40))
    for expression, found in choice.errors.items():
        assert choice.tiles[expression] == cost[expression]
        out = attention(q, k, v, expression, **sizes).detach()
        off = ((out - exact).norm(dim=-1) / longest[:, None]).flatten(0, 1)[drawn].amax(0)
        assert found == pytest.approx(off.tolist(), abs=1e-5)
    ranked = sorted(cost, key=cost.get)
    for h, chosen in enumerate(choice.chosen):
        good = [x for x in ranked if choice.errors[x][h] <= 0.02]
        assert chosen == (good[0] if good else "strided(1)")
    assert choice.pattern == by_head(*map(parse, choice.chosen)) and len(set(choice.chosen)) >= 3
    assert choice.chosen[0] == "sink(4)" and choice.chosen[3] == "strided(1)"
    # What is enough from the start computes nothing else.
    alone = patterns.per_head(*operands, candidates, 10.0, **sizes)
    assert list(alone.errors) == ranked[:1] and set(alone.chosen) == {ranked[0]}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"candidates": []}, r"candidates is \[\]: it must be patterns, at least one"),
        ({"candidates": "local(4)"}, r"candidates is 'local\(4\)': it must be patterns"),
        ({"candidates": [by_head(local(4), sink(3))]}, r"a candidate is by_head\(.*it must be a pattern for one head"),
        ({"candidates": [3]}, r"a candidate is a int: it must be a Pattern, or a str"),
        ({"error": 0}, r"error is 0: it must be above 0"),
        ({"error": float("nan")}, r"error is nan: it must be above 0"),
        ({"error": "x"}, r"error is 'x': it must be a number"),
        ({"quantile": 1.5}, r"quantile is 1.5: it must be from 0 to 1"),
        ({"rows": 0}, r"rows is 0: it must be at least 1"),
        ({"q": torch.zeros(64, 2, 8)}, r"q is \[64, 2, 8\]: it must be \[B, Sq, H, D\]"),
    ],
)
def test_a_choice_by_head_refuses(options, words):
    x = torch.zeros(1, 64, 2, 8)
    call = dict(q=x, k=x, v=x, candidates=["local(4)"], error=0.1) | options
    with pytest.raises((ValueError, TypeError), match=r"\[patterns\] .*" + words):
        patterns.per_head(**call)
