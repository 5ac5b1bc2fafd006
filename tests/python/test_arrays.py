"""numpy and other DLPack arrays, argument errors, and explain."""

import heddle
import numpy as np
import pytest
import torch
from kit import OnlyDLPack


def arrays(dtype=np.float32):
    random = np.random.default_rng(0)
    return [random.standard_normal((2, 9, h, 8)).astype(dtype) for h in (4, 2, 2)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numpy_gives_numpy_and_the_same_bits_as_torch(dtype):
    q, k, v = arrays(dtype)
    mask = np.arange(9) < 7
    bias = np.linspace(-1, 1, 81, dtype=dtype).reshape(9, 9)
    out, lse = heddle.attention(q, k, v, causal="top_left", mask=mask, bias=bias, return_lse=True)
    assert type(out) is np.ndarray and out.dtype == dtype and lse.dtype == np.float32 and lse.shape == (2, 4, 9)
    expected = heddle.attention(
        *map(torch.from_numpy, (q, k, v)), causal="top_left", mask=torch.from_numpy(mask),
        bias=torch.from_numpy(bias), return_lse=True,
    )  # fmt: skip
    assert np.array_equal(out, expected[0].numpy()) and np.array_equal(lse, expected[1].numpy())


def test_numpy_views_and_read_only_inputs():
    q, k, v = arrays()
    expected = heddle.attention(q, k, v)
    flipped = [np.ascontiguousarray(x[:, ::-1]) for x in (k, v)]
    for x in (q, *flipped):
        x.flags.writeable = False
    assert np.array_equal(heddle.attention(q, flipped[0][:, ::-1], flipped[1][:, ::-1]), expected)  # negative strides
    wide = np.zeros((2, 9, 4, 16), np.float32)
    wide[..., ::2] = q
    assert np.array_equal(heddle.attention(wide[..., ::2], k, v), expected)


def test_numpy_packed_with_dropout():
    q = np.random.default_rng(1).standard_normal((18, 2, 8)).astype(np.float32)
    cu = np.array([0, 4, 18], np.int32)
    out, lse = heddle.attention(
        q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, dropout_p=0.4, dropout_seed=8, return_lse=True
    )
    t, c = torch.from_numpy(q), torch.from_numpy(cu)
    expected = heddle.attention(t, t, t, cu_seqlens_q=c, cu_seqlens_k=c, dropout_p=0.4, dropout_seed=8)
    assert lse.shape == (2, 18) and np.array_equal(out, expected.numpy())
    with pytest.raises(ValueError, match="dropout_seed is missing"):
        heddle.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, dropout_p=0.4)


def test_bfloat16_through_dlpack():
    tensors = [torch.randn(2, 9, 4, 8, dtype=torch.bfloat16) for _ in range(3)]
    out, lse = heddle.attention(*map(OnlyDLPack, tensors), causal="bottom_right", return_lse=True)
    out, lse = torch.from_dlpack(out), torch.from_dlpack(lse)
    expected = heddle.attention(*tensors, causal="bottom_right", return_lse=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_numpy_cache_and_rotary():
    random = np.random.default_rng(2)
    new = random.standard_normal((2, 3, 2, 8)).astype(np.float32)
    angle = random.standard_normal((16, 4)).astype(np.float32)
    at = np.array([5, 0], np.int32)
    k_cache, v_cache = np.zeros((2, 10, 2, 8), np.float32), np.zeros((2, 10, 2, 8), np.float32)
    heddle.append_kv_cache(new, new, k_cache, v_cache, at, rotary_cos=np.cos(angle), rotary_sin=np.sin(angle))
    turned = heddle.apply_rotary(new, np.cos(angle), np.sin(angle), offsets=at)
    for b, begin in enumerate(at):
        np.testing.assert_allclose(k_cache[b, begin : begin + 3], turned[b], rtol=1e-6, atol=1e-6)
        assert np.array_equal(v_cache[b, begin : begin + 3], new[b])
    assert np.count_nonzero(np.abs(v_cache).sum((2, 3))) == 6
    v_cache.flags.writeable = False
    with pytest.raises(ValueError, match="v_cache is read-only"):
        heddle.append_kv_cache(new, new, k_cache, v_cache, at)


Q, K = (2, 9, 4, 8), (2, 9, 2, 8)


def zeros(shape, dtype="float32"):
    return np.zeros(shape, dtype)


ERRORS = {
    "heads": (dict(k=zeros((2, 9, 3, 8)), v=zeros((2, 9, 3, 8))), r"\[attention_forward\] k has 3 heads and q has 4"),
    "head size": (dict(k=zeros((2, 9, 2, 7))), r"k has head size 7 and q has 8.*found q \[2, 9, 4, 8\], k \[2, 9, 2, 7\]"),
    "float64": (dict(q=zeros(Q, "float64")), "q is float64: it must be float32, float16 or bfloat16"),
    "mixed dtypes": (dict(k=zeros(K, "float16")), "k is float16: it must be float32"),
    "rank": (dict(q=zeros((2, 9, 8))), r"q has 3 dimensions: it must be \[B, Sq, H, D\]"),
    "mask of numbers": (dict(mask=zeros((9, 9))), "mask is float32: it must be bool"),
    "mask shape": (dict(mask=zeros((9, 8), bool)), r"mask is \[1, 1, 9, 8\]: dimension 3 must be 1 or 9"),
    "long indices": (dict(seqused_k=zeros(2, "int64")), "seqused_k is int64: it must be int32"),
    "lengths": (dict(seqused_k=np.array([9, 10], np.int32)), r"seqused_k\[1\] is 10: it must be from 0 to"),
    "causal": (dict(causal="lower"), "causal is 'lower': it must be 'none', 'top_left' or 'bottom_right'"),
    "window": (dict(window=(-2, 0)), r"window is \(-2, 0\): each side must be at least 0, or -1"),
    "dropout": (dict(dropout_p=1.0, dropout_seed=0), r"it must be in \[0, 1\)"),
    "method": (dict(method="fast"), "method is 'fast': it must be 'flash', 'baseline'"),
    "force": (dict(force="sm70"), "force is 'sm70': the candidates are"),
    "softcap": (dict(softcap=float("nan")), "softcap is nan: it must be finite"),
    "pages": (dict(page_table=np.array([[0, 5], [1, 0]], np.int32)), r"page_table\[0, 1\] is 5: it must be from 0 to 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("kind", ["numpy", "torch", "torch with gradient"])
def test_errors_name_the_argument_its_value_and_the_rule(name, kind):
    changes, message = ERRORS[name]
    given = {"q": zeros(Q), "k": zeros(K), "v": zeros(K), **changes}
    if kind != "numpy":
        given = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    if kind == "torch with gradient":
        given["q"].requires_grad_()
    with pytest.raises(ValueError, match=message):
        heddle.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize("causal", [True, False, np.True_])
def test_a_bool_as_causal_is_refused_with_the_choices(causal):
    q = zeros(Q)
    with pytest.raises((TypeError, ValueError), match="'top_left'.*'bottom_right'"):
        heddle.attention(q, q, q, causal=causal)


def test_types_are_refused():
    q = zeros(Q)
    with pytest.raises(ValueError, match="q is a list: it must be an array that supports DLPack"):
        heddle.attention([1.0], q, q)
    with pytest.raises(TypeError, match="k is a ndarray: it must be a torch tensor"):
        heddle.attention(torch.zeros(Q), q, q)
    with pytest.raises(TypeError, match="window is 3: it must be a pair"):
        heddle.attention(q, q, q, window=3)


def test_explain_lists_candidates_and_the_choice():
    q, k, v = arrays()
    found = heddle.explain(q, k, v, causal="top_left")
    assert found.chosen.supported and not found.chosen.reason and found.chosen.seconds > 0
    assert sum(c.chosen for c in found) == 1 and {"cpu", "cpu_baseline", "reference"} <= {c.name for c in found}
    assert all(c.chosen or c.reason or c.seconds >= found.chosen.seconds for c in found)
    table = str(found)
    assert all(c.name in table for c in found) and f"*  {found.chosen.name}" in table
    assert heddle.explain(*map(torch.from_numpy, (q, k, v))).chosen == heddle.explain(q, k, v).chosen
    assert heddle.explain((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), dtype="bfloat16", backward=True).chosen
    forced = heddle.explain(q, k, v, force="reference")
    assert forced.chosen.name == "reference"
    assert all(c.reason for c in forced if c.name != "reference")
    with pytest.raises(ValueError, match="k has 3 heads"):
        heddle.explain(q, k[:, :, :1].repeat(3, 2), v)


def test_explain_says_first_that_a_build_has_no_gpu_kernels():
    q, k, v = arrays()
    reasons = {c.name: c.reason for c in heddle.explain(q, k, v)}
    without = "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON"
    other = "it runs on another device than the tensors are on"
    assert reasons["sm90"] == reasons["sm80"] == (other if heddle._heddle.cuda_built() else without)


def test_runtime_settings():
    assert heddle.cpu_target() in heddle.cpu_targets()
    threads = heddle.num_threads()
    try:
        heddle.set_num_threads(3)
        assert heddle.num_threads() == 3
        for wrong in (0, 4097):
            with pytest.raises(ValueError, match=f"threads is {wrong}: it must be from 1 to 4096"):
                heddle.set_num_threads(wrong)
        with pytest.raises((ValueError, RuntimeError), match="pentium"):
            heddle.set_cpu_target("pentium")
    finally:
        heddle.set_num_threads(threads)
    q, k, v = arrays()
    default, chosen = heddle.attention(q, k, v), heddle.cpu_target()
    for target in heddle.cpu_targets():
        try:
            heddle.set_cpu_target(target)
            assert heddle.cpu_target() == target
            np.testing.assert_allclose(heddle.attention(q, k, v), default, rtol=1e-5, atol=1e-6)
        finally:
            heddle.set_cpu_target("")
    assert heddle.cpu_target() == chosen
