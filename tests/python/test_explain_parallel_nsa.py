"""heddle.nsa.explain_parallel_nsa: each step as parallel_nsa calls it, and the length below which dense attention is faster."""

import heddle
import pytest
import torch
from heddle import _heddle, nsa

Q, K = (1, 4096, 16, 64), (1, 4096, 2, 64)
STEPS = ["pooled keys", "compressed", "selection", "selected"]


def steps_of(*shapes, **options):
    return nsa.explain_parallel_nsa(*(shapes or (Q, K)), **options).steps


def test_steps_and_their_kernels():
    found = nsa.explain_parallel_nsa(Q, K, window_size=256)
    assert list(found.steps) == [*STEPS, "window"]
    assert {step.chosen.name for step in found.steps.values()} == {found.dense.chosen.name} == {"cpu"}
    assert found.seconds > sum(step.chosen.seconds for step in found.steps.values())  # values are pooled, too
    assert found.dense_seconds == found.dense.chosen.seconds
    assert list(steps_of(backward=True)) == ["pooled keys", "compressed", "selected"]
    assert "pooled values" in steps_of(Q, K, (1, 4096, 2, 32))
    text = str(found)
    for name in (*found.steps, "all", "dense attention"):
        assert f"\n{name} " in text
    assert f"faster below about {found.dense_below} keys" in text


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("window_size", [0, 512])
def test_dense_attention_is_faster_below_and_only_there(backward, window_size):
    given = dict(window_size=window_size, backward=backward)
    below = nsa.explain_parallel_nsa(Q, K, **given).dense_below
    assert 0 < below < 1 << 20 and below % 64 == 0
    for length, dense_wins in ((below - 64, True), (below, False), (8 * below, False)):
        at = nsa.explain_parallel_nsa((1, length, 16, 64), (1, length, 2, 64), **given)
        assert (at.dense_seconds <= at.seconds) == dense_wins, length
        assert at.dense_below == below


def test_lists_as_long_as_sequences_are_never_faster():
    found = nsa.explain_parallel_nsa(Q, K, block_counts=1 << 20)
    assert found.dense_below is None and "faster" not in str(found)


def test_sharing_takes_fewer_rows():
    plain = steps_of(window_size=256)
    seed = steps_of(window_size=256, **nsa.presets(8)["seed"])
    for name in ("selection", "selected", "window"):
        assert seed[name].chosen.seconds < 0.7 * plain[name].chosen.seconds, name
    assert seed["compressed"].chosen.seconds == plain["compressed"].chosen.seconds
    fast = steps_of(window_size=256, **nsa.presets(8)["fast"])
    assert fast["selection"].chosen.seconds < 0.3 * plain["selection"].chosen.seconds
    assert fast["window"].chosen.seconds == plain["window"].chosen.seconds
    odd = steps_of(query_stride=3, share="selection")  # no part of a block: lists have a slot more
    assert odd["selected"].chosen is not None


def test_steps_are_those_of_the_operations():
    steps = steps_of(window_size=256)
    assert steps["pooled keys"] == nsa.explain_pool_keys(K, 64)
    assert steps["selection"] == nsa.explain_select_blocks(Q, (1, 64, 2, 64), 16)
    lists = (1, 4096, 2, 16)
    given = dict(causal="bottom_right", out_dtype="float32")
    assert steps["selected"] == heddle.explain_sparse_attention(Q, K, K, lists, **given)
    assert steps["window"] == heddle.explain(Q, K, K, window=(255, None), **given)


def test_tensors_chunks_and_short_sequences():
    q, k = torch.empty(2, 100, 4, 32, dtype=torch.bfloat16), torch.empty(2, 700, 2, 32, dtype=torch.bfloat16)
    of_tensors = nsa.explain_parallel_nsa(q, k)
    of_shapes = nsa.explain_parallel_nsa((2, 100, 4, 32), (2, 700, 2, 32), dtype="bfloat16")
    assert of_tensors.steps == of_shapes.steps and of_tensors.dense == of_shapes.dense
    assert nsa.explain_parallel_nsa((1, 5, 4, 32), (1, 5, 2, 32)).steps["compressed"].chosen is not None


def test_a_gpu_that_need_not_be_here():
    found = nsa.explain_parallel_nsa(Q, K, dtype="bfloat16", gpu="h100")
    if _heddle.cuda_built():
        assert {step.chosen.name for step in found.steps.values()} <= {"cuda", "sm80", "sm90"}
        assert found.dense_below > 0
    else:
        assert found.seconds is None and found.dense_below is None
        assert "this heddle was built without CUDA" in str(found)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (r"q is \[1, 9, 4\]: it must be \[B, T, heads, D\]", dict(q=(1, 9, 4))),
        ("q has 4097 rows and k 4096: the rows of q are the last positions", dict(q=(1, 4097, 16, 64))),
        ("block_counts is -1", dict(block_counts=-1)),
        ("block_size is 65", dict(block_size=65)),
        ("window_size is -1", dict(window_size=-1)),
        ("share is 'all'", dict(share="all")),
        ("forced", dict(forced=("last",))),
        ("gpu is 'v100': it must be one of", dict(gpu="v100")),
    ],
)
def test_refusals(words, change):
    with pytest.raises(ValueError, match=words):
        nsa.explain_parallel_nsa(**{"q": Q, "k": K, **change})
