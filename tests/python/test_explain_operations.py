"""What all operations but the forward of attention and of linear layers would run: explain_*() of the package."""

import heddle
import numpy as np
import pytest
import torch
from heddle import lowbit

WITHOUT = "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON"
BUILT = heddle._heddle.cuda_built()


def calls(module=np):
    """By name: a call without a GPU, whose arrays are numpy's or torch's."""
    as_wanted = torch.from_numpy if module is torch else lambda x: x
    rows, cache = (as_wanted(np.zeros((2, n, 2, 64), np.float16)) for n in (3, 16))
    at, table = as_wanted(np.full(2, 4, np.int32)), as_wanted(np.zeros((16, 32), np.float32))
    weights = as_wanted(np.full((4, 64), 0.5, np.float32))
    matrix = lowbit.quantize(weights, "nvfp4")
    packed = lowbit.pack(matrix)
    return {
        "rotary": lambda **o: heddle.explain_apply_rotary(rows, table, table, offsets=at, **o),
        "append": lambda **o: heddle.explain_append_kv_cache(
            rows,
            rows,
            cache,
            cache.copy() if module is np else cache.clone(),
            at,
            rotary_cos=table,
            rotary_sin=table,
            **o,
        ),
        "quantize": lambda **o: lowbit.explain_quantize(weights, "nvfp4", rule="mse", **o),
        "dequantize": lambda **o: lowbit.explain_dequantize(matrix, "float16", **o),
        "unpack": lambda **o: packed.explain_unpack("float16", **o),
    }


@pytest.mark.parametrize("module", [np, torch])
def test_candidates_of_caches_and_quantisation(module):
    for method, call in calls(module).items():
        found = call()
        assert (found.chosen.name, found.chosen.method) == ("cpu", method)
        assert found.chosen.seconds > 0 and found.chosen.plan and "cpu" in str(found)
        reasons = {c.name: c.reason for c in found}
        assert reasons["cuda"] == ("it runs on another device than the tensors are on" if BUILT else WITHOUT)
        assert ("reference" in reasons) == (method in ("quantize", "dequantize"))


def test_candidates_on_a_gpu_that_is_not_here():
    for call in calls().values():
        found = call(gpu="h100")
        assert (found.chosen and found.chosen.name) == ("cuda" if BUILT else None)
        assert not any(c.supported for c in found if c.name != "cuda")
        with pytest.raises(ValueError, match="gpu is 'v100': it must be one of"):
            call(gpu="v100")


def test_the_environment_is_heard_where_a_candidate_has_the_name(monkeypatch):
    monkeypatch.setenv("HEDDLE_KERNEL", "reference")
    assert {name: call().chosen.name for name, call in calls().items()} == {
        "rotary": "cpu",
        "append": "cpu",
        "quantize": "reference",
        "dequantize": "reference",
        "unpack": "cpu",
    }
    weights = np.linspace(-2, 2, 256, dtype=np.float32).reshape(2, 128)
    by_reference = lowbit.quantize(weights, "nvfp4", rule="mse")
    monkeypatch.delenv("HEDDLE_KERNEL")
    by_cpu = lowbit.quantize(weights, "nvfp4", rule="mse")
    assert np.array_equal(by_reference.codes, by_cpu.codes) and np.array_equal(by_reference.scales, by_cpu.scales)


def test_refusals_are_those_of_the_operation():
    rows, at = np.zeros((2, 3, 2, 64), np.float16), np.full(2, 15, np.int32)
    cache = np.zeros((2, 16, 2, 64), np.float16)
    with pytest.raises(ValueError, match=r"\[explain_append_kv_cache\]"):
        heddle.explain_append_kv_cache(rows, rows, cache, cache.copy(), at)  # positions beyond the cache
    with pytest.raises(ValueError, match="rule is floor, which nvfp4 does not have"):
        lowbit.explain_quantize(np.zeros((2, 64), np.float32), rule="floor")
    with pytest.raises(ValueError, match="dtype is 'float64'"):
        lowbit.explain_dequantize(lowbit.quantize(np.zeros((2, 64), np.float32)), "float64")
    with pytest.raises(TypeError, match="weights is a list"):
        lowbit.explain_quantize([[1.0]])
    packed = lowbit.pack(lowbit.quantize(np.zeros((2, 64), np.float32)))
    for dtype in ("float64", torch.float64, None):
        with pytest.raises(
            ValueError, match=r"\[explain_unpack_weights\] dtype is .*: it must be 'float32', 'float16' or"
        ):
            packed.explain_unpack(dtype)


def test_dtypes_of_weights_have_several_names():
    matrix = lowbit.quantize(np.zeros((2, 64), np.float32))
    packed = lowbit.pack(matrix)
    for dtype in ("float16", "fp16", np.float16, torch.float16):
        assert lowbit.explain_dequantize(matrix, dtype) == lowbit.explain_dequantize(matrix, "float16")
        assert packed.explain_unpack(dtype) == packed.explain_unpack("float16")


def test_appends_in_four_bits():
    cache = heddle.Int4Cache.empty(2, 512, 2, 64)
    rows, at = torch.zeros(2, 3, 2, 64, dtype=torch.bfloat16), torch.full((2,), 200, dtype=torch.int32)
    found = cache.explain_append(rows, rows, at)
    assert [c.name for c in found] == ["cpu", "cuda"] and found.chosen.method == "append"
    there = cache.explain_append(rows, rows, at, gpu="a100")
    assert (there.chosen and there.chosen.name) == ("cuda" if BUILT else None)
    with pytest.raises(ValueError, match=r"\[explain_append_int4_cache\]"):
        cache.explain_append(rows, rows, torch.full((2,), 9999, dtype=torch.int32))


def test_attention_over_a_cache_in_four_bits():
    cache = heddle.Int4Cache.empty(2, 512, 2, 64)
    q, at = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16), torch.full((2,), 200, dtype=torch.int32)
    found = cache.explain_attention(q, at, causal="bottom_right", mask=torch.ones(2, 1, 1, 575, dtype=torch.bool))
    assert (found.chosen.name, found.chosen.method) == ("cpu", "flash")
    assert cache.explain_attention(q, at, force="reference").chosen.name == "reference"
    seeded = cache.explain_attention(q, at, dropout_p=0.1, dropout_seed=torch.tensor(3))
    assert [c.name for c in seeded] == [c.name for c in found]
    there = cache.explain_attention(q, at, gpu="a100")
    assert (there.chosen and there.chosen.name) == ("sm80_decode" if BUILT else None)
    with pytest.raises(ValueError, match=r"\[explain_attention_over_int4_cache\] seqused_k\[0\] is 9999"):
        cache.explain_attention(q, torch.full((2,), 9999, dtype=torch.int32))
    with pytest.raises(ValueError, match="gpu is 'v100': it must be one of"):
        cache.explain_attention(q, at, gpu="v100")


# -------------------------------------------------------------------------------------------------------------- merges


def parts(module=np, dtype=np.float32, packed=False):
    as_wanted = torch.from_numpy if module is torch else lambda x: x
    rows, per_row = ((9, 4, 16), (4, 9)) if packed else ((2, 9, 4, 16), (2, 4, 9))
    os = [as_wanted(np.zeros(rows, dtype)) for _ in range(3)]
    return os, [as_wanted(np.zeros(per_row, np.float32)) for _ in range(3)], as_wanted(np.zeros(4, np.float32))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("module", [np, torch])
def test_candidates_of_merges(module, packed, backward):
    os, lses, sink = parts(module, np.float16, packed)
    for options in ({}, {"sink": sink, "out_dtype": "float32"}):
        found = heddle.explain_merge_attention(os, lses, backward=backward, **options)
        assert [c.name for c in found] == ["cpu", "reference", "cuda"]
        assert (found.chosen.name, found.chosen.method) == ("cpu", "merge")
        assert found.chosen.seconds > 0 and found.chosen.plan
    if module is torch:
        leaves = [x.requires_grad_() for x in os]
        assert heddle.explain_merge_attention(leaves, lses, backward=backward).chosen.name == "cpu"


def test_gradients_of_merges_are_another_call():
    forward, backward = (heddle.explain_merge_attention(*parts(), backward=b) for b in (False, True))
    assert backward.chosen.seconds > forward.chosen.seconds


@pytest.mark.parametrize("backward", [False, True])
def test_merges_on_gpus(backward):
    for gpu in ("a100", "h100"):
        there = heddle.explain_merge_attention(*parts(), backward=backward, gpu=gpu)
        assert (there.chosen and there.chosen.name) == ("cuda" if BUILT else None)
        on_cpus = {c.reason for c in there if c.name != "cuda"}
        assert on_cpus == {"it runs on another device than the tensors are on"}
    with pytest.raises(ValueError, match="gpu is 'v100': it must be one of"):
        heddle.explain_merge_attention(*parts(), backward=backward, gpu="v100")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("gpu", [None, "h100"])
def test_refusals_are_those_of_merges(gpu, backward):
    os, lses, sink = parts()

    def refused(words, *arguments, error=ValueError, **options):
        with pytest.raises(error, match=r"^\[explain_merge_attention\] " + words):
            heddle.explain_merge_attention(*arguments, **{"backward": backward, "gpu": gpu, **options})

    refused("os are 0 and lses are 0: there must be at least one", [], [])
    refused("os are 3 and lses are 2: there must be as many", os, lses[:2])
    refused(r"os\[1\] is \[1, 9, 4, 16\]: it must have the shape of os\[0\]", [os[0], os[1][:1]], lses[:2])
    refused(r"os\[0\] has 2 dimensions", [os[0][0, 0]], lses[:1])
    refused(r"lses\[0\] is float64", os[:1], [lses[0].astype(np.float64)])
    refused(r"lses\[0\] is missing", os[:1], [None])
    refused(r"sink is \[3\]: it must have one logit for each of 4 heads", os, lses, sink[:3])
    refused("out_dtype is 'float16': it must be float32", os, lses, out_dtype="float16")
    refused("backward is 'yes': it must be True or False", os, lses, backward="yes", error=TypeError)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_over_lists_on_a_gpu_that_need_not_be_here(backward):
    q, blocks = (1, 128, 4, 64), (1, 128, 1, 2)
    assert heddle.explain_sparse_attention(q, q, q, blocks, backward=backward).chosen.name == "cpu"
    there = heddle.explain_sparse_attention(q, q, q, blocks, backward=backward, gpu="h100", dtype="bfloat16")
    if heddle._heddle.cuda_built():
        assert there.chosen.name == ("sm80" if backward else "sm90")
    else:
        assert there.chosen is None
    there = heddle.explain_sparse_attention(q, q, q, blocks, backward=backward, gpu="a100", dtype="bfloat16")
    assert there.chosen is None or there.chosen.name == "sm80"
    masks = {"masks": (3, 1, 2), "mask_ids": blocks, "backward": backward}
    assert heddle.explain_sparse_attention(q, q, q, blocks, **masks).chosen.name == "cpu"
    there = heddle.explain_sparse_attention(q, q, q, blocks, gpu="h100", dtype="bfloat16", **masks)
    reasons = {c.name: c.reason for c in there}
    assert there.chosen is None
    if heddle._heddle.cuda_built():
        assert reasons["sm80"] == "its lists are of whole blocks, without masks"
    with pytest.raises(ValueError, match="gpu is 'v100': it must be one of"):
        heddle.explain_sparse_attention(q, q, q, blocks, backward=backward, gpu="v100")


@pytest.mark.skipif(not heddle._heddle.cuda_built(), reason="needs a build with CUDA")
@pytest.mark.parametrize("backward", [False, True])
def test_lists_that_tiles_of_rows_share_on_hopper(backward):
    def on(gpu, blocks, **options):
        q, k = (1, 4096, 8, 128), (1, 4096, 2, 128)
        options = {"block_size": 128, "query_rows": 128, "dtype": "bfloat16", **options}
        return heddle.explain_sparse_attention(q, k, k, blocks, backward=backward, gpu=gpu, **options)

    def refusal(*arguments, **options):
        return next(c.reason for c in on(*arguments, **options) if c.name == "sm90_tiles")

    for lists in ((1, 32, 1, 4), (1, 32, 2, 32), (1, 32, 8, 4)):
        chosen = on("h200", lists).chosen
        assert chosen.name == "sm90_tiles" and "that a list names" in chosen.plan or backward
        assert chosen.name == "sm90_tiles" and "whose lists name them" in chosen.plan or not backward
    assert on("h100", (1, 32, 1, 32), block_size=64, deterministic=True).chosen.name == "sm90_tiles"
    assert on("a100", (1, 32, 1, 4)).chosen.name == "sm80"
    # Rows of heads that share a list fill tiles of the forward; those of the backward are of one head.
    assert refusal("h100", (1, 128, 1, 4), query_rows=32) == (
        "lists must be shared by all rows of its tiles: query_rows must be a multiple of 64; it is 32"
        if backward
        else ""
    )
    assert "query_rows must be a multiple of " in refusal("h100", (1, 128, 8, 4), query_rows=32)
    assert refusal("h100", (1, 32, 1, 4), block_size=32) == "its blocks have 64 or 128 keys, not 32"
    assert refusal("h100", (1, 32, 1, 4), dtype="float32") == "it takes float16 and bfloat16, not float32"
    assert refusal("h100", (1, 32, 1, 4), q_offset=5) == "it has no q_offset, key_offset and q_step"


# ----------------------------------------------------------------------------------------- gradients of linear layers


def layer(**options):
    return lowbit.pack(lowbit.quantize(torch.full((32, 64), 0.5), "nvfp4"), **options)


@pytest.mark.parametrize("norm", lowbit.NORMS)
@pytest.mark.parametrize("activation", lowbit.ACTIVATIONS)
def test_candidates_of_linear_gradients(activation, norm):
    vectors = {"bias": torch.zeros(32)}
    if norm != "none":
        vectors["norm_weight"] = torch.ones(64, requires_grad=True)
    if norm == "layer_norm":
        vectors["norm_bias"] = torch.zeros(64)
    gated = activation == "swiglu"
    call = dict(activation=activation, norm=norm, residual=torch.zeros(2, 3, 16 if gated else 32), **vectors)
    x, packed = torch.zeros(2, 3, 64, requires_grad=True), layer(gated=gated)
    found = lowbit.explain(x, packed, backward=True, **call)
    assert [(c.name, c.method) for c in found if c.chosen] == [("cpu", "linear")]
    assert {c.name for c in found} == {"cpu", "reference", "cublaslt"}  # the forward has others
    assert (
        next(c for c in lowbit.explain(x, packed, backward=True, force="reference", **call) if c.chosen).name
        == "reference"
    )
    there = lowbit.explain(x.bfloat16(), packed, backward=True, gpu="h100", **{n: v if isinstance(v, str) else v.bfloat16() for n, v in call.items()})  # fmt: skip
    assert [c.name for c in there if c.chosen] == (["cublaslt"] if BUILT else [])


def test_linear_gradients_hear_the_names_that_they_have():
    """As the backward of linear() does: a forward may be asked for by a name that its gradients do not know."""
    x, packed = torch.zeros(3, 64), layer()
    for force, name in (("reference", "reference"), ("sm90_w4a16", "cpu"), ("", "cpu")):
        assert [c.name for c in lowbit.explain(x, packed, force=force, backward=True) if c.chosen] == [name]


def test_linear_gradients_of_numpy_and_plain_layers():
    x = np.zeros((3, 64), np.float32)
    packed = lowbit.pack(lowbit.quantize(np.full((32, 64), 0.5, np.float32), "int8_row"))
    found = lowbit.explain(x, packed, int8_x=True, backward=True)
    assert [c.name for c in found if c.chosen] == ["cpu"]
    assert found != lowbit.explain(x, packed, int8_x=True)


def test_refusals_are_those_of_linear():
    x, packed = torch.zeros(3, 64), layer()
    for gpu in (None, "h100"):
        for words, given, options in (
            (r"\[explain_linear\] x is \[3, 63\] and weights have 64 columns", x[:, :63].contiguous(), {}),
            (r"\[explain_linear\] bias is \[31\]", x, {"bias": torch.zeros(31)}),
            ("activation is 'tanh'", x, {"activation": "tanh"}),
            ("norm_bias is given and norm is rms_norm", x, {"norm": "rms_norm", "norm_bias": torch.zeros(64)}),
            ("gpu is 'v100'", x, {"gpu": "v100"}),
        ):
            with pytest.raises(ValueError, match=words):
                lowbit.explain(given, packed, backward=True, **{"gpu": gpu, **options})
    with pytest.raises(TypeError, match=r"\[explain_linear\] backward is 1.5: it must be True or False"):
        lowbit.explain(x, packed, backward=1.5)
    with pytest.raises(TypeError, match="weights is a Tensor: it must be a PackedTensor"):
        lowbit.explain(x, torch.zeros(32, 64), backward=True)
