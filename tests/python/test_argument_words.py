"""What bad values are told: by the name that the caller typed, with what was given and what it must be."""

import dataclasses

import heddle
import numpy as np
import pytest
import torch
from heddle import lowbit


def tensors(kind="torch"):
    torch.manual_seed(0)
    found = [torch.randn(2, 5, 4, 8) for _ in "qkv"]
    return found if kind == "torch" else [x.numpy() for x in found]


VALUES = {
    "scale": (dict(scale="1"), TypeError, "scale is '1': it must be a number"),
    "scale of a list": (dict(scale=[1.0]), TypeError, "scale is a list: it must be a number"),
    "softcap": (dict(softcap=None), TypeError, "softcap is None: it must be a number"),
    "dropout_p in words": (dict(dropout_p="0.1", dropout_seed=1), TypeError, "dropout_p is '0.1': it must be a number"),
    "dropout_p of one": (dict(dropout_p=1, dropout_seed=1), ValueError, r"dropout_p is 1: it must be in \[0, 1\)"),
    "dropout_p below zero": (dict(dropout_p=-0.5, dropout_seed=1), ValueError, r"dropout_p is -0.5: it must be in \[0, 1\)"),
    "window": (dict(window=(1.5, 2)), TypeError, "window's left side is 1.5: it must be an integer of 64 bits"),
    "window of text": (dict(window=(-1, "2")), TypeError, "window's right side is '2': it must be an integer of 64 bits"),
    "window beyond 64 bits": (dict(window=(-1, 1 << 80)), TypeError, r"window's right side is \d+: it must be an integer of 64"),
    "window of one": (dict(window=(1,)), TypeError, r"window is \(1,\): it must be a pair \(left, right\), -1 or None for an open"),
    "max_seqlen_k": (dict(max_seqlen_k="7"), TypeError, "max_seqlen_k is '7': it must be an integer of 64 bits"),
    "method": (dict(method=3), TypeError, "method is 3: it must be a string"),
    "force": (dict(force=b"cpu"), TypeError, "force is a bytes: it must be a string"),
    "causal": (dict(causal=["none"]), ValueError, r"causal is \['none'\]: it must be 'none', 'top_left' or 'bottom_right'"),
    "precision": (dict(precision=["f32"]), ValueError, r"precision is \['f32'\]: it must be 'f32', 'tf32' or 'int8_qk'"),
    "a list of lengths": (dict(seqused_k=[3, 3]), (TypeError, ValueError), r"seqused_k is a list: it must be a"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("kind", ["torch", "numpy", "with gradient"])
def test_values(name, kind):
    given, error, words = VALUES[name]
    q, k, v = tensors("numpy" if kind == "numpy" else "torch")
    if kind == "with gradient":
        q.requires_grad_()
    with pytest.raises(error, match=r"\[attention\w*\] " + words):
        heddle.attention(q, k, v, **given)
    with pytest.raises(error, match=r"\[\w+\] " + words):
        heddle.explain(q, k, v, **given)


def test_seeds():
    q, k, v = tensors()
    for seed, shown in (("a", "'a'"), (0.5, "0.5"), ([1], "a list")):
        with pytest.raises(TypeError, match=rf"dropout_seed is {shown}".replace("[", r"\[") + ": it must be an int"):
            heddle.attention(q, k, v, dropout_p=0.1, dropout_seed=seed)
    same = [heddle.attention(q, k, v, dropout_p=0.1, dropout_seed=seed) for seed in (7, np.int64(7), torch.tensor(7))]
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])


def test_operands_that_are_missing():
    q, k, v = tensors()
    for given, name in (((q, k, None), "v"), ((q, None, v), "k"), ((q.requires_grad_(), None, None), "k")):
        with pytest.raises(TypeError, match=rf"\[attention\] {name} is None: it must be a torch tensor"):
            heddle.attention(*given)
        with pytest.raises(TypeError, match=rf"\[attention\] {name} is None: it must be a torch tensor"):
            torch.compile(heddle.attention, backend="aot_eager")(*given)
    with pytest.raises(ValueError, match=r"\[attention_forward\] v is missing"):
        heddle.attention(*tensors("numpy")[:2], None)
    with pytest.raises(TypeError, match=r"\[attention\] k is a ndarray: it must be a torch tensor, as the others are"):
        heddle.attention(q, k.numpy(), v)


def test_lists_of_lengths_over_caches():
    q, k, v = tensors()
    caches = [torch.zeros(2, 12, 4, 8) for _ in "kv"]
    with pytest.raises(TypeError, match=r"\[attention_with_kv_cache\] seqlens is a list: it must be a torch tensor"):
        heddle.attention_with_kv_cache(q, k, v, *caches, [1, 2])
    with pytest.raises(TypeError, match=r"\[append_kv_cache\] seqlens is a list: it must be a torch tensor"):
        heddle.append_kv_cache(k, v, *caches, [1, 2])
    with pytest.raises(
        TypeError, match=r"\[attention_with_kv_cache\] page_table is a ndarray: it must be a torch tensor"
    ):
        heddle.attention_with_kv_cache(
            q, k, v, *caches, torch.tensor([1, 2], dtype=torch.int32), page_table=np.zeros((2, 2))
        )


def test_open_windows():
    for kind in ("torch", "numpy"):
        q, k, v = tensors(kind)
        for given, same in (((None, None), (-1, -1)), ((None, 1), (-1, 1)), ([2, None], (2, -1))):
            found, expected = heddle.attention(q, k, v, window=given), heddle.attention(q, k, v, window=same)
            assert np.array_equal(np.asarray(found), np.asarray(expected))
            assert heddle.explain(q, k, v, window=given) == heddle.explain(q, k, v, window=same)


def test_candidates_asked_for_by_name():
    q, k, v = tensors()
    other = "it runs on another device than the tensors are on"
    without = "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON"
    words = f"force is 'sm90', which cannot serve this call: {other if heddle._heddle.cuda_built() else without}"
    for leaf in (q, q.clone().requires_grad_()):
        with pytest.raises(ValueError) as refused:
            heddle.attention(leaf, k, v, force="sm90")
        assert str(refused.value) == f"[attention_forward] {words}"
    packed = lowbit.pack(lowbit.quantize(torch.randn(8, 32), "nvfp4"))
    with pytest.raises(ValueError) as refused:
        lowbit.linear(torch.randn(3, 32), packed, force="sm80_linear")
    assert str(refused.value) == f"[linear_forward] {words.replace('sm90', 'sm80_linear')}"


def test_names_of_dtypes():
    shape = (1, 4, 2, 8)
    q = torch.randn(shape)
    for name, others in {
        "float32": ("fp32", torch.float32, np.float32, np.dtype("float32")),
        "float16": ("fp16", torch.float16, np.float16, np.dtype("float16")),
        "bfloat16": ("bf16", torch.bfloat16),
    }.items():
        x = q.to(getattr(torch, name))
        for dtype in (name, *others):
            assert heddle.explain(shape, shape, shape, dtype=dtype) == heddle.explain(x, x, x)
    for dtype in ("half", torch.float64, np.float64, 16, None, ["float32"]):
        with pytest.raises(ValueError, match=r"\[explain\] dtype is .*: it must be 'float32', 'float16' or 'bfloat16'"):
            heddle.explain(shape, shape, shape, dtype=dtype)


def layer():
    torch.manual_seed(0)
    return lowbit.quantize(torch.randn(16, 32), "nvfp4")


def test_weights_that_are_not_packed():
    for x, matrix in (
        (torch.randn(3, 32), layer()),
        (np.ones((3, 32), np.float32), lowbit.quantize(np.ones((16, 32), np.float32))),
    ):
        words = r"weights is a QuantizedTensor: pack it first, heddle.lowbit.pack\(weights\)"
        with pytest.raises(TypeError, match=rf"\[linear\] {words}"):
            lowbit.linear(x, matrix)
        with pytest.raises(TypeError, match=rf"\[explain_linear\] {words}"):
            lowbit.explain(x, matrix)
        with pytest.raises(TypeError, match=r"\[linear\] weights is a Tensor: it must be a PackedTensor"):
            lowbit.linear(x, torch.randn(16, 32))
        with pytest.raises(
            TypeError, match=r"\[pack_weights\] matrix is a PackedTensor: it must be a lowbit.QuantizedTensor"
        ):
            lowbit.pack(lowbit.pack(matrix))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_packing_for_a_gpu_that_is_not_there():
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        with pytest.raises(
            RuntimeError, match=rf"\[pack_weights\] device is '{device}': (this heddle was built without|torch sees)"
        ):
            lowbit.pack(layer(), device=device)
    for device in ("gpu", "xpu", 3):
        with pytest.raises(
            ValueError, match=rf"\[pack_weights\] device is '{device}': it must be 'cpu', 'cuda' or 'cuda:N'"
        ):
            lowbit.pack(layer(), device=device)
    with pytest.raises(ValueError, match="weights of numpy are packed for 'cpu'"):
        lowbit.pack(lowbit.quantize(np.ones((16, 32), np.float32)), device="cuda")


def test_linear_on_several_devices():
    x, packed = torch.randn(3, 32), lowbit.pack(layer())
    elsewhere = dataclasses.replace(packed, data=packed.data.to("meta"))
    bias = torch.zeros(16, device="meta")
    for call, first, second in (
        (lambda x, **o: lowbit.linear(x.to("meta"), packed, **o), "weights is on cpu", "x on meta"),
        (lambda x, **o: lowbit.linear(x, elsewhere, **o), "weights is on meta", "x on cpu"),
        (lambda x, **o: lowbit.linear(x, packed, bias=bias, **o), "bias is on meta", "x on cpu"),
    ):
        for given, options in ((x, {}), (x.clone().requires_grad_(), {}), (x, dict(out=torch.empty(3, 16)))):
            with pytest.raises(ValueError, match=rf"\[linear_forward\] .* {first}, {second}"):
                call(given, **options)
    found = lowbit.linear(x.to("meta"), elsewhere, bias=bias, activation="silu")
    assert found.device.type == "meta" and found.shape == (3, 16)
    with pytest.raises(TypeError, match=r"\[linear_forward\] bias is a ndarray: it must be a torch tensor"):
        lowbit.linear(x, packed, bias=np.zeros(16, np.float32))


def test_dtypes_that_nothing_has():
    q, k, v = tensors("numpy")
    wide = np.zeros(2)
    long = np.zeros(2, np.int64)
    floats = "it must be float32, float16 or bfloat16$"
    for name in ("cu_seqlens_q", "seqused_q", "page_table", "cache_batch_idx", "cache_leftpad", "draft_mask"):
        with pytest.raises(ValueError, match=rf"\] {name} is int64: it must be int32$"):
            heddle.attention(q, k, v, **{name: long})
    for name in ("q_offset", "key_offset"):
        with pytest.raises(ValueError, match=rf"\] {name} is int64: it must be int32$"):
            heddle.attention(q, k, v, **{name: long})
    for name in ("alibi_slopes", "sink", "q_scale", "k_scale", "v_scale"):
        with pytest.raises(ValueError, match=rf"\] {name} is float64: it must be float32$"):
            heddle.attention(q, k, v, **{name: wide})
    with pytest.raises(ValueError, match=r"\] mask is int64: it must be bool \(true = attend\)"):
        heddle.attention(q, k, v, mask=long)
    with pytest.raises(ValueError, match=rf"\] bias is float64: {floats}"):
        heddle.attention(q, k, v, bias=wide)
    with pytest.raises(ValueError, match=r"\] lses\[1\] is float64: it must be float32$"):
        lse = np.zeros((2, 4, 5), np.float32)
        heddle.merge_attention([q, q], [lse, lse.astype(np.float64)])
    with pytest.raises(ValueError, match=rf"\] os\[0\] is float64: {floats}"):
        heddle.merge_attention([q.astype(np.float64)], [lse])
    with pytest.raises(ValueError, match=r"\] blocks is int64: it must be int32$"):
        heddle.sparse_attention(q, k, v, np.zeros((2, 5, 1, 1), np.int64))
