"""Arrays of other libraries than torch on a GPU: cupy's, and what can DLPack and nothing else."""

import dataclasses

import heddle
import numpy as np
import pytest
import torch
from heddle import _heddle, lowbit, nsa

pytestmark = pytest.mark.skipif(
    not (_heddle.cuda_built() and torch.cuda.is_available()), reason="needs a GPU and a build with CUDA"
)


class OnlyDLPack:
    """An array of a library that makes none: DLPack is all it can do."""

    def __init__(self, tensor):
        self.tensor, self.streams = tensor, []

    def __dlpack__(self, *, stream=None, **options):
        self.streams.append(stream)
        return self.tensor.__dlpack__(stream=stream, **options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def operands(dtype=torch.float16, rows=300):
    torch.manual_seed(0)
    return [torch.randn(2, rows, heads, 64, dtype=dtype, device="cuda") for heads in (4, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dlpack_alone_writes_to_out(dtype):
    q, k, v = operands(dtype)
    expected, expected_lse = heddle.attention(q, k, v, causal="top_left", return_lse=True)
    out, lse = torch.empty_like(q), torch.empty(2, 4, 300, device="cuda")
    arrays = [OnlyDLPack(x) for x in (q, k, v, out, lse)]
    found = heddle.attention(*arrays[:3], causal="top_left", return_lse=True, out=arrays[3], lse_out=arrays[4])
    assert found == (arrays[3], arrays[4]) and torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert all(set(x.streams) <= {1, -1} and 1 in x.streams for x in arrays)  # the legacy default stream
    with pytest.raises(ValueError, match="q is a OnlyDLPack on a GPU, whose library makes no array of .*: give out"):
        heddle.attention(*arrays[:3])
    assert torch.cuda.current_device() == 0


def test_dlpack_alone_pools_and_chooses():
    q, k, _ = operands()
    pooled = nsa.pool_keys(k, 64)
    lists = nsa.select_blocks(q, pooled, 3)
    out = [OnlyDLPack(torch.full_like(x, 7)) for x in (pooled, lists)]
    assert nsa.pool_keys(OnlyDLPack(k), 64, out=out[0]) is out[0] and torch.equal(out[0].tensor, pooled)
    assert nsa.select_blocks(OnlyDLPack(q), out[0], 3, out=out[1]) is out[1] and torch.equal(out[1].tensor, lists)


def test_dlpack_alone_beside_work_on_another_stream():
    """A producer makes data ready on the stream that it is told, and a call on a stream that nobody knows is waited for."""
    q, k, v = operands(rows=2000)
    expected = heddle.attention(q * 2, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late, out = q * 2, torch.empty_like(q)
        heddle.attention(OnlyDLPack(late), OnlyDLPack(k), OnlyDLPack(v), out=OnlyDLPack(out))
        assert torch.equal(out.cpu(), expected.cpu())


class TestCupy:
    cupy = None

    @pytest.fixture(autouse=True)
    def library(self):
        type(self).cupy = pytest.importorskip("cupy")

    def arrays(self, tensors):
        return [self.cupy.from_dlpack(x) for x in tensors]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_the_bits_of_torch(self, dtype):
        tensors = operands(dtype)
        out, lse = heddle.attention(*self.arrays(tensors), causal="top_left", return_lse=True)
        expected = heddle.attention(*tensors, causal="top_left", return_lse=True)
        assert isinstance(out, self.cupy.ndarray) and isinstance(lse, self.cupy.ndarray)
        for found, wanted in zip((out, lse), expected):
            assert torch.equal(torch.from_dlpack(found), wanted)

    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_runs_on_cupy_s_stream(self, non_blocking):
        tensors = operands(rows=2000)
        expected = heddle.attention(tensors[0] * 2, *tensors[1:])
        torch.cuda.synchronize()
        stream = self.cupy.cuda.Stream(non_blocking=non_blocking)
        with stream:
            q, k, v = self.arrays(tensors)
            for _ in range(50):
                q *= 1
            out = heddle.attention(q * 2, k, v)
            again = out + 0  # at once, on the same stream
            assert np.array_equal(self.cupy.asnumpy(again), expected.cpu().numpy())

    def test_caches_and_rotary(self):
        cupy = self.cupy
        new = cupy.random.standard_normal((2, 3, 2, 64), dtype=cupy.float32).astype(cupy.float16)
        k_cache, v_cache = (cupy.zeros((2, 64, 2, 64), cupy.float16) for _ in range(2))
        at = cupy.array([5, 0], cupy.int32)
        q = cupy.ones((2, 1, 4, 64), cupy.float16)
        heddle.append_kv_cache(new, new, k_cache, v_cache, at)
        found = heddle.attention_with_kv_cache(q, new, new, k_cache, v_cache, at + 3)
        tensors = [torch.from_dlpack(x) for x in (q, new, new, k_cache, v_cache)]
        expected = heddle.attention_with_kv_cache(*tensors, torch.from_dlpack(at + 3))
        assert torch.equal(torch.from_dlpack(found), expected)
        assert cupy.array_equal(k_cache[0, 5:8], new[0]) and cupy.array_equal(k_cache[1, :3], new[1])
        table = cupy.ones((64, 16), cupy.float32), cupy.zeros((64, 16), cupy.float32)
        assert cupy.array_equal(heddle.apply_rotary(new, *table, offsets=at), new)

    def test_linear(self):
        packed = lowbit.pack(lowbit.quantize(torch.randn(64, 128), "nvfp4"), device="cuda")
        x = torch.randn(5, 128, device="cuda", dtype=torch.float16)
        expected = lowbit.linear(x, packed, activation="relu")
        for weights in (packed, dataclasses.replace(packed, data=self.cupy.from_dlpack(packed.data))):
            found = lowbit.linear(self.cupy.from_dlpack(x), weights, activation="relu")
            assert isinstance(found, self.cupy.ndarray) and torch.equal(torch.from_dlpack(found), expected)

    def test_arrays_on_the_cpu_are_refused(self):
        q, k, v = self.arrays(operands())
        with pytest.raises(ValueError, match="k is on another device than q"):
            heddle.attention(q, self.cupy.asnumpy(k), v)
