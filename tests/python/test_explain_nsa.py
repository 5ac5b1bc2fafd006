"""heddle.nsa.explain_pool_keys and explain_select_blocks: what would run, and the operations' own refusals."""

import pytest
import torch
from heddle import _heddle, nsa

X, Q, K = (2, 300, 2, 64), (2, 300, 8, 64), (2, 18, 2, 64)
WITHOUT = "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON"
ELSEWHERE = "it runs on another device than the tensors are on"
CALLS = {
    "pool_keys": (["cuda"], "pool", lambda **o: nsa.explain_pool_keys(o.pop("x", X), o.pop("block", 16), **o)),
    "gradient of pool_keys": (
        ["cuda"],
        "pool",
        lambda **o: nsa.explain_pool_keys(o.pop("x", X), o.pop("block", 16), backward=True, **o),
    ),
    "select_blocks": (
        ["sm90", "sm80"],
        "select",
        lambda **o: nsa.explain_select_blocks(
            o.pop("q", Q), o.pop("k", K), o.pop("n", 4), **{"block_size": 16, "compression_block": 16, **o}
        ),
    ),
}
every_call = pytest.mark.parametrize("call", CALLS)


@every_call
@pytest.mark.parametrize("dtype", ["float32", "float16", torch.bfloat16])
def test_candidates_here(call, dtype):
    on_gpus, method, explain = CALLS[call]
    found = explain(dtype=dtype)
    assert [c.name for c in found] == ["cpu", "reference", *on_gpus]
    chosen = found.chosen
    assert (chosen.name, chosen.method) == ("cpu", method) and chosen.seconds > 0 and chosen.plan
    assert found[1].reason == "it runs only when it is asked for"
    assert {c.reason for c in found[2:]} == {ELSEWHERE if _heddle.cuda_built() else WITHOUT}
    assert f"cpu: {chosen.plan}" in str(found)


@every_call
def test_candidates_on_a_gpu_that_need_not_be_here(call):
    on_gpus, _, explain = CALLS[call]
    there = explain(dtype="bfloat16", gpu="h100")
    assert (there.chosen and there.chosen.name) == (on_gpus[0] if _heddle.cuda_built() else None)
    assert {c.reason for c in there if c.name not in on_gpus} == {ELSEWHERE}
    with pytest.raises(ValueError, match="gpu is 'v100': it must be one of"):
        explain(gpu="v100")
    with pytest.raises(ValueError, match="gpu is 3: it must be a name"):
        explain(gpu=3)


@pytest.mark.skipif(not _heddle.cuda_built(), reason="the sentence is of a build with CUDA")
def test_a_gpu_says_what_it_refuses():
    there = nsa.explain_select_blocks(Q, K, 4, gpu="h100")
    assert there.chosen is None
    assert {c.reason for c in there if c.name in ("sm90", "sm80")} == {"it takes float16 and bfloat16, not float32"}


@pytest.mark.skipif(not _heddle.cuda_built(), reason="the answer of a build with CUDA")
def test_hopper_has_a_kernel_for_many_rows_with_lse():
    """The choice does not follow from how many sequences there are."""

    def chosen(gpu="h100", rows=300, batch=2, **options):
        q, k = (batch, rows, 8, 64), (batch, 18, 2, 64)
        sizes = {"block_size": 16, "compression_block": 16, "dtype": "bfloat16"}
        return nsa.explain_select_blocks(q, k, 4, gpu=gpu, **{**sizes, **options}).chosen.name

    assert [chosen(batch=batch) for batch in (1, 2, 500)] == ["sm90"] * 3
    assert [chosen(rows=rows, batch=batch) for rows in (1, 8) for batch in (1, 500)] == ["sm80"] * 4
    assert chosen(lse=False) == chosen(compression_stride=8) == chosen(gpu="a100") == "sm80"


def test_shapes_are_as_good_as_tensors():
    x, q, k = (torch.empty(shape, dtype=torch.float16) for shape in (X, Q, K))
    assert nsa.explain_pool_keys(x, 16, 8) == nsa.explain_pool_keys(X, 16, 8, dtype="float16")
    assert nsa.explain_select_blocks(q, k, 4) == nsa.explain_select_blocks(Q, K, 4, dtype="float16")


def test_lse_saves_a_product():
    with_lse, without = (nsa.explain_select_blocks(Q, K, 4, lse=there).chosen for there in (True, False))
    assert without.seconds > with_lse.seconds
    assert "two products" in without.plan and "two products" not in with_lse.plan


@every_call
def test_what_runs_is_what_was_named(call):
    """Where a call is refused, its explanation is, in the same words."""
    explain = CALLS[call][2]
    refusals = {
        "pool_keys": [
            (dict(block=0), "block is 0"),
            (dict(block=16, stride=0), "stride is 0"),
            (dict(block=16, stride=17), "stride"),
            (dict(x=(2, 300, 64)), r"x is \[2, 300, 64\]: it must be \[B, S, heads, D\]"),
            (dict(dtype="float64"), "dtype is 'float64'"),
        ],
        "select_blocks": [
            (dict(n=-1), "n is -1"),
            (dict(block_size=17), "block_size is 17"),
            (dict(compression_stride=7), "stride"),
            (dict(q=(2, 300, 7, 64)), "heads"),
            (dict(k=(3, 18, 2, 64)), "k_pooled has 3 sequences and q has 2"),
            (dict(forced=("last",)), "forced"),
            (dict(q_step=0), "q_step is 0"),
        ],
    }
    for change, words in refusals["select_blocks" if call == "select_blocks" else "pool_keys"]:
        with pytest.raises(ValueError, match=words):
            explain(**change)


def test_words_are_those_of_the_operations():
    def words(function, *arguments, **options):
        with pytest.raises(ValueError) as refused:
            function(*arguments, **options)
        return str(refused.value).partition("] ")[2]

    x, q, k = (torch.zeros(shape) for shape in (X, Q, K))
    for block, stride in ((16, 17), (3, 0)):
        assert words(nsa.explain_pool_keys, X, block, stride) == words(nsa.pool_keys, x, block, stride)
    for options in (dict(block_size=17), dict(compression_block=24, compression_stride=7), dict(q_step=0)):
        assert words(nsa.explain_select_blocks, Q, K, 4, **options) == words(nsa.select_blocks, q, k, 4, **options)
    heads = (2, 300, 7, 64)
    assert words(nsa.explain_select_blocks, heads, K, 4) == words(nsa.select_blocks, torch.zeros(heads), k, 4)


def test_types():
    with pytest.raises(TypeError, match="backward is 1"):
        nsa.explain_pool_keys(X, 16, backward=1.0)
    with pytest.raises(TypeError, match="block is 1.5"):
        nsa.explain_pool_keys(X, 1.5)
    with pytest.raises(TypeError, match="lse is 'no'"):
        nsa.explain_select_blocks(Q, K, 4, lse="no")


class TestAStep:
    Q, NEW = (16, 1, 64, 128), (16, 1, 4, 128)

    @pytest.mark.skipif(not _heddle.cuda_built(), reason="the answer of a build with CUDA")
    def test_says_what_a_gpu_would_run(self):
        found = nsa.explain_nsa_step(self.Q, self.NEW, window_size=512, gpu="h200")
        assert [c.name for c in found] == ["sm90"] and found.chosen.method == "nsa_step" and found.chosen.seconds > 0
        for more in (dict(window_size=0), dict(compressed=False), dict(capacity=10), dict(block_counts=32)):
            assert nsa.explain_nsa_step(self.Q, self.NEW, **more, gpu="h100").chosen, more

    @pytest.mark.skipif(not _heddle.cuda_built(), reason="the sentences of a build with CUDA")
    @pytest.mark.parametrize(
        "change, reason",
        [
            (dict(block_counts=33), "32"),
            (dict(k_new=(16, 1, 2, 128)), "16 query heads"),
            (dict(gpu="a100"), "Hopper"),
            (dict(gpu=None), "another device"),
        ],
        ids=str,
    )
    def test_says_why_it_is_none(self, change, reason):
        call = {"k_new": self.NEW, "gpu": "h100", **change}
        found = nsa.explain_nsa_step(self.Q, call.pop("k_new"), **call)
        assert found.chosen is None and reason in found[0].reason

    def test_refuses_what_a_step_refuses(self):
        with pytest.raises(ValueError, match="one row of each sequence"):
            nsa.explain_nsa_step((16, 2, 64, 128), (16, 2, 4, 128))
        with pytest.raises(ValueError, match="capacity is 0"):
            nsa.explain_nsa_step(self.Q, self.NEW, capacity=0)
        with pytest.raises(ValueError, match="dtype is float32|float32: a step takes"):
            nsa.explain_nsa_step(self.Q, self.NEW, dtype="float32")

    def test_shapes_are_as_good_as_tensors(self):
        rows = [torch.zeros(2, 1, n, 64, dtype=torch.bfloat16) for n in (8, 2)]
        shapes = [tuple(x.shape) for x in rows]
        assert str(nsa.explain_nsa_step(*rows, gpu="h100")) == str(nsa.explain_nsa_step(*shapes, gpu="h100"))
