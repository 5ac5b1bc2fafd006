"""Arrays of libraries that Heddle knows only by DLPack, on the CPU and, as far as that goes without one, on a GPU."""

import types

import heddle
import numpy as np
import pytest
import torch
from dlpack_kit import Producer, zeros
from heddle import _heddle, nsa
from heddle.hosts import arrays

built = pytest.mark.skipif(not _heddle.cuda_built(), reason="a build without CUDA reads no arrays on GPUs")
GPU = (2, 0)
SHAPE = (1, 5, 2, 8)


def random(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_library_of_dlpack_alone_on_the_cpu():
    q, k, v = (random(seed=i) for i in range(3))
    out, lse = heddle.attention(*map(Producer, (q, k, v)), causal="top_left", return_lse=True)
    expected = heddle.attention(q, k, v, causal="top_left", return_lse=True)
    assert np.array_equal(np.from_dlpack(out), expected[0]) and np.array_equal(np.from_dlpack(lse), expected[1])
    cache = [zeros((1, 9, 2, 8)) for _ in range(2)]
    heddle.append_kv_cache(Producer(k), Producer(v), *cache, Producer(np.array([3], np.int32)))
    assert np.array_equal(cache[0].array[:, 3:8], k) and np.array_equal(cache[1].array[:, 3:8], v)
    cache[0].read_only = True
    with pytest.raises(ValueError, match="k_cache is read-only: it is written, so it must be writable"):
        heddle.append_kv_cache(Producer(k), Producer(v), *cache, Producer(np.array([3], np.int32)))


@built
def test_an_array_on_a_gpu_is_asked_for_by_the_stream():
    x = zeros(SHAPE, device=GPU)
    assert _heddle.describe(x, "attention_forward", "q") == (SHAPE, 0)
    assert x.asked == [{"stream": -1, "max_version": (1, 0)}]  # whose data is not read
    old = zeros(SHAPE, device=GPU, old=True)
    assert _heddle.describe(old, "attention_forward", "q") == (SHAPE, 0) and old.asked == [{"stream": -1}]
    # One array on the CPU has the call refused, after all were seen.
    for stream, number in ((0, 1), (2, 2), (12345, 12345)):
        x, out = zeros(SHAPE, device=GPU), zeros(SHAPE)
        with pytest.raises(ValueError, match="on another device"):
            _heddle.apply_rotary(x, out, random((9, 4)), random((9, 4)), False, None, stream)
        assert [asked["stream"] for asked in x.asked] == [number]
    managed = zeros(SHAPE, device=(13, 0))
    assert _heddle.describe(managed, "attention_forward", "q") == (SHAPE, 0)


def test_refusals_of_devices():
    q = zeros(SHAPE)
    where = (
        "Heddle runs on the CPU and on NVIDIA GPUs" if _heddle.cuda_built() else "this build of Heddle runs on the CPU"
    )
    with pytest.raises(ValueError, match=rf"q is not in CPU memory \(DLPack device 10\): {where}"):
        heddle.attention(zeros(SHAPE, device=(10, 0)), q, q)
    with pytest.raises(ValueError, match="k is another|k is on another device|k is not in CPU memory"):
        heddle.attention(q, zeros(SHAPE, device=GPU), q)
    if not _heddle.cuda_built():
        with pytest.raises(ValueError, match=rf"q is not in CPU memory \(DLPack device 2\): {where}"):
            heddle.attention(*(zeros(SHAPE, device=GPU) for _ in range(3)))
        return
    with pytest.raises(
        ValueError, match=r"keep is not in CPU memory \(DLPack device 2\): this operation runs on the CPU"
    ):
        _heddle.dropout_mask(zeros(SHAPE, bool, device=GPU), 0.5, 1)
    with pytest.raises(ValueError, match="q says that it is on a GPU .DLPack device 2.* exports memory of device 1"):
        heddle.attention(zeros(SHAPE, device=GPU, exported=(1, 0)), q, q)
    x, out = zeros(SHAPE, device=GPU), zeros(SHAPE, device=(2, 1))
    with pytest.raises(ValueError, match="out is on cuda:1 and another tensor on cuda:0: they must be on one GPU"):
        _heddle.apply_rotary(x, out, random((9, 4)), random((9, 4)), False, None)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="there is no usable NVIDIA GPU or driver"):
            heddle.attention(*(zeros(SHAPE, device=GPU) for _ in range(3)))


class Library:
    """An array library on a GPU; `stream` is what it works on."""

    float32, float16, int32 = np.float32, np.float16, np.int32

    def __init__(self, stream):
        self.stream, self.made = stream, []

    def array(self, values):
        made = Producer(np.asarray(values), device=GPU)
        made.__class__ = type("LibraryArray", (Producer,), {"__array_namespace__": lambda x: self})
        return made

    def empty(self, shape, dtype, device):
        assert device == GPU
        self.made.append(self.array(np.zeros(shape, dtype)))
        return self.made[-1]

    def from_dlpack(self, x):
        assert x.__dlpack_device__() == GPU
        x.__dlpack__(stream=self.stream, max_version=(1, 0), copy=None)
        raise AssertionError("a question is no array")


@pytest.mark.parametrize(
    "says, stream", [(77, 77), (1, 1), (2, 2), (None, 1), (-1, None)]
)  # fmt: skip
def test_the_stream_that_a_library_works_on(says, stream):
    assert arrays.stream_of(Library(says), GPU) == stream


def test_libraries_that_do_not_say():
    def refusing(x):
        raise NotImplementedError

    assert arrays.stream_of(None, GPU) is None
    assert arrays.stream_of(types.SimpleNamespace(from_dlpack=refusing), GPU) is None
    assert arrays.stream_of(types.SimpleNamespace(), GPU) is None


@pytest.fixture
def gpu(monkeypatch):
    """What happens on a GPU, in its order, without one: a native module whose operations write ones on the host."""
    happened = []

    def forward(q, k, v, out, lse, items, heads_first=False, stream=0):
        happened.append(("attention", stream))
        out.array[...] = 1
        if lse is not None:
            lse.array[...] = 2

    native = types.SimpleNamespace(
        describe=lambda x, operation, name: (x.array.shape, 0),
        cuda_built=lambda: True,
        validates=lambda: False,
        exchange_current_gpu=lambda gpu: happened.append(("gpu", gpu)) or 3,
        wait_for=lambda stream: happened.append(("wait", stream)),
        attention_forward=forward,
    )
    monkeypatch.setattr(arrays, "_heddle", native)
    return happened


@pytest.mark.parametrize("says, stream", [(77, 77), (1, 0), (2, 2)])
def test_a_call_on_a_gpu_is_on_the_library_s_stream(gpu, says, stream):
    library = Library(says)
    q = library.array(random())
    out, lse = heddle.attention(q, q, q, return_lse=True)
    assert [out, lse] == library.made and out.array.shape == SHAPE and lse.array.shape == (1, 2, 5)
    assert (out.array == 1).all() and (lse.array == 2).all()
    assert gpu == [("gpu", 0), ("attention", stream), ("gpu", 3)]


def test_pooled_keys_and_lists_are_the_library_s(gpu):
    def native(wrote):  # the last argument is the stream
        return lambda *arguments: gpu.append((wrote, arguments[-1]))

    arrays._heddle.pool_keys, arrays._heddle.select_blocks = native("pool"), native("select")
    library = Library(77)
    x = library.array(random())
    pooled, lists = nsa.pool_keys(x, 2), nsa.select_blocks(x, x, 3)
    assert [pooled, lists] == library.made
    assert (pooled.array.shape, pooled.array.dtype) == ((1, 2, 2, 8), np.float32)
    assert (lists.array.shape, lists.array.dtype) == ((1, 5, 2, 3), np.int32)
    assert gpu == [("gpu", 0), ("pool", 77), ("gpu", 3), ("gpu", 0), ("select", 77), ("gpu", 3)]


def test_a_result_that_the_caller_has(gpu):
    alone = [zeros(SHAPE, device=GPU), zeros((1, 2, 5), device=GPU)]
    q = Library(77).array(random())
    assert heddle.attention(q, q, q, return_lse=True, out=alone[0], lse_out=alone[1]) == tuple(alone)
    assert (alone[0].array == 1).all() and (alone[1].array == 2).all() and not q.__array_namespace__().made
    q = zeros(SHAPE, device=GPU)
    assert heddle.attention(q, q, q, out=alone[0]) is alone[0]
    # Waited for: the memory is another library's, and the stream of one that does not say.
    steps = [("gpu", 0), ("attention", 77), ("wait", 77), ("gpu", 3)]
    assert gpu == steps + [("gpu", 0), ("attention", 0), ("wait", 0), ("gpu", 3)]
    del gpu[:]
    library = Library(77)
    q, bias = library.array(random()), library.array(random((1, 1, 5, 5)))
    heddle.attention(q, q, q, bias=bias, out=library.array(random()))
    assert gpu == [("gpu", 0), ("attention", 77), ("gpu", 3)]
    heddle.attention(q, q, q, bias=zeros((1, 1, 5, 5), device=GPU), out=library.array(random()))
    assert ("wait", 77) in gpu


def test_a_call_is_waited_for_where_the_stream_is_not_known(gpu):
    library = Library(-1)
    q = library.array(random())
    heddle.attention(q, q, q)
    assert gpu == [("gpu", 0), ("attention", 0), ("wait", 0), ("gpu", 3)]


def test_results_that_nobody_makes_are_refused(gpu):
    alone = zeros(SHAPE, device=GPU)
    with pytest.raises(
        ValueError, match=r"\[attention_forward\] q is a Producer on a GPU, whose library makes no array of float32"
    ):
        heddle.attention(alone, alone, alone)
    with pytest.raises(
        ValueError, match=r"\[pool_keys\] x is a Producer .* of float32 that Heddle could write: give out"
    ):
        nsa.pool_keys(alone, 2)
    library = Library(77)
    immutable = library.array(random())
    type(immutable).__module__ = "jaxlib._jax"
    with pytest.raises(ValueError, match="q is a LibraryArray on a GPU, whose library makes no array"):
        heddle.attention(immutable, immutable, immutable)
    mutable = Library(77).array(random())
    with pytest.raises(ValueError, match="out is a LibraryArray, which nobody may write"):
        heddle.attention(mutable, mutable, mutable, out=immutable)
    with pytest.raises(ValueError, match="k_cache is a LibraryArray, which nobody may write"):
        heddle.append_kv_cache(mutable, mutable, immutable, mutable, np.zeros(1, np.int32))
    assert [step for step in gpu if step[0] == "attention"] == [] and gpu[-1] == ("gpu", 3)
