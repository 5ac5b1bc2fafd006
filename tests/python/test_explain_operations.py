"""What caches and quantisation would run: explain_*() of the package."""

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


def test_appends_in_four_bits():
    cache = heddle.Int4Cache.empty(2, 512, 2, 64)
    rows, at = torch.zeros(2, 3, 2, 64, dtype=torch.bfloat16), torch.full((2,), 200, dtype=torch.int32)
    found = cache.explain_append(rows, rows, at)
    assert [c.name for c in found] == ["cpu", "cuda"] and found.chosen.method == "append"
    there = cache.explain_append(rows, rows, at, gpu="a100")
    assert (there.chosen and there.chosen.name) == ("cuda" if BUILT else None)
    with pytest.raises(ValueError, match=r"\[explain_append_int4_cache\]"):
        cache.explain_append(rows, rows, torch.full((2,), 9999, dtype=torch.int32))
