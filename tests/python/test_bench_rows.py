"""Rows of the GPU benchmark, on the CPU: what they are compared with, and what becomes of one that is wrong. No time is looked at."""

import json
import math
import re
import sys
import time
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
heddle = pytest.importorskip("heddle")
from torch.overrides import TorchFunctionMode  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import attention_bench_gpu as bench  # noqa: E402
import gpu_backward_rows  # noqa: E402
import gpu_block_sparse_rows  # noqa: E402
import gpu_decode_rows  # noqa: E402
import gpu_lowbit_rows  # noqa: E402
import gpu_nsa_rows  # noqa: E402
import gpu_peers  # noqa: E402
import gpu_reference  # noqa: E402
import gpu_rows  # noqa: E402
import gpu_timing  # noqa: E402
import sources  # noqa: E402


class OnTheCpu(TorchFunctionMode):
    """What asks for a GPU gets the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Clock:
    """A device that is the CPU: calls are over when they return."""

    host_seconds = staticmethod(time.perf_counter)

    def pause(self, seconds):
        pass

    synchronize = lambda self: None
    sleep = pause

    class event:
        def record(self):
            self.at = time.perf_counter()

        def query(self):
            return False

        def elapsed_time(self, end):
            return 1e3 * max(end.at - self.at, 1e-9)


class OfAnyDevice(type):
    made = torch.Generator

    def __call__(cls, device="cpu"):
        return cls.made()


class Generator(metaclass=OfAnyDevice):
    """torch.Generator, of the CPU whatever was asked for. A class: torch imports parts of itself late, and annotates with it."""


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_timing, "Cuda", Clock)
    monkeypatch.setattr(gpu_timing, "SAMPLE_MS", 0.01)
    monkeypatch.setattr(gpu_timing, "HOST_SECONDS", 1e-6)
    monkeypatch.setattr(gpu_timing, "WARM_CALLS", 1)
    monkeypatch.setattr(
        gpu_timing,
        "graph",
        lambda call, rotations, prepare: gpu_timing.Contender((lambda: call(0)) if rotations > 1 else call, 1, prepare),
    )
    monkeypatch.setattr(gpu_decode_rows, "ROTATED_BYTES", 1 << 16)
    monkeypatch.setattr(gpu_nsa_rows, "CHECKED", 192)
    monkeypatch.setattr(gpu_block_sparse_rows, "CHECKED", 256)
    for name in ("gemm_tflops", "copy_tbs"):
        monkeypatch.setattr(bench, name, lambda: 1.0)
    for backward in (False, True):
        monkeypatch.setitem(sources.ATTENTION, ("cpu", backward), ("src/cpu/attention*",))
    flags = {
        name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        for name in ("flash", "mem_efficient", "math", "cudnn")
    }
    with OnTheCpu():
        yield
    for name, value in flags.items():  # rows choose back ends for good
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)


def made(calls, **more):
    return lambda: gpu_rows.Row(calls, 1.0, "calls/s", **more)


def made_ones():
    return gpu_rows.Row({"heddle": lambda: ONES, "cudnn": lambda: ONES}, 1.0, "calls/s")


def on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(gpu_peers, "absent", dict)
    monkeypatch.setattr(bench.gpu_conditions, "conditions", lambda method: {"method": method, "date": "d"})


ONES = torch.ones(4, 3)
NAN = torch.full((4, 3), math.nan)


def test_a_right_row_has_its_difference_its_spread_and_its_sources():
    row = bench.measure(
        "r", made({"heddle": lambda: ONES * 1.001, "cudnn": lambda: ONES}, kernel="sm90", sources=("src/cuda/common",))
    )
    assert row["difference"] == {"heddle": pytest.approx(0.001, rel=1e-2)} and row["limit"] == gpu_rows.LIMIT
    assert row["rival"] == "cudnn" and row["ratio"] == pytest.approx(row["rates"]["heddle"] / row["rates"]["cudnn"])
    assert len(row["milliseconds"]["heddle"]) == gpu_timing.ROUNDS and row["spread"]["heddle"] >= 0
    assert sources.current(row)


@pytest.mark.parametrize("output", [ONES * 1.03, NAN, -ONES])
def test_a_wrong_output_has_no_time(output):
    row = bench.measure("r", made({"heddle": lambda: output, "cudnn": lambda: ONES}))
    assert "differs by" in row["wrong"] and "rates" not in row and "milliseconds" not in row


def test_one_wrong_gradient_among_right_ones_is_found():
    row = bench.measure("r", made({"heddle": lambda: (ONES, ONES, NAN), "fa2": lambda: (ONES, ONES, ONES)}))
    assert "heddle differs by nan" in row["wrong"]


def test_a_row_that_is_compared_with_nothing_is_wrong():
    assert (
        "nor another contender" in bench.measure("r", made({"heddle": lambda: ONES, "default": lambda: ONES}))["wrong"]
    )


def test_a_row_of_heddles_that_fails_is_wrong_and_says_why():
    def fail():
        raise RuntimeError("no such kernel\nand more")

    assert (
        bench.measure("r", made({"heddle": fail, "cudnn": lambda: ONES}))["wrong"]
        == "Wrong: heddle failed: RuntimeError: no such kernel"
    )
    row = bench.measure("r", made({"heddle": lambda: ONES, "fa2": fail, "cudnn": lambda: ONES}))
    assert row["absent"] == {"fa2": "RuntimeError: no such kernel"} and set(row["rates"]) == {"heddle", "cudnn"}


def test_a_rival_that_computes_something_else_is_out_of_the_race():
    calls = {"heddle": lambda: ONES, "cudnn": lambda: ONES, "fa3": lambda: 2 * ONES}
    row = bench.measure("r", made(calls))
    assert "fa3" not in row["rates"] and row["absent"]["fa3"].startswith("its output differs by")


def test_a_reference_is_held_against_each_row_and_a_rival_against_all_of_it():
    expected = lambda: gpu_reference.Expected(lambda o: o[:2], ONES[:2])
    small = torch.cat([100 * ONES[:1], ONES[1:2] * 1.5])  # the second row is wrong, beside one that hides it in a norm
    assert gpu_reference.from_expected(
        small, gpu_reference.Expected(lambda o: o, torch.cat([100 * ONES[:1], ONES[:1]]))
    ) == pytest.approx(0.5)
    unseen = torch.cat([ONES[:3], NAN[:1]])  # the reference does not look at the last row
    assert "wrong" not in bench.measure("r", made({"heddle": lambda: unseen}, reference=expected))
    assert "wrong" in bench.measure("r", made({"heddle": lambda: unseen, "cudnn": lambda: ONES}, reference=expected))


def test_where_nobody_has_a_kernel_the_row_says_so():
    row = bench.measure("r", made({}, absent={"heddle": "head sizes to 128"}))
    assert row["rates"] == {} and row["absent"] == {"heddle": "head sizes to 128"} and "wrong" not in row


def test_a_run_goes_on_after_a_wrong_row_and_ends_with_status_1(tmp_path, monkeypatch):
    rows = {
        "bad": made({"heddle": lambda: NAN, "cudnn": lambda: ONES}),
        "good": made({"heddle": lambda: ONES, "cudnn": lambda: ONES}),
    }
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(bench, "known", lambda: rows)
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit, match="1 rows are wrong: bad"):
        bench.main()
    written = bench.json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in written["rows"]] == ["good"] and [row["name"] for row in written["wrong"]] == ["bad"]


SMALL = {
    "dense": lambda: gpu_rows.batched(1, 96, 4, 2, 64, True),
    "window": lambda: gpu_rows.windowed(96, 2, 64, 16),
    "documents": lambda: gpu_rows.documents(600, 4, 2, 64, True),
    "unfused": lambda: gpu_rows.unfused(64, 1, 2, 64),
    "half": lambda: gpu_rows.half(64, 1, 2, 64),
    "python call": lambda: gpu_rows.short(64, "host"),
    "decode": lambda: gpu_decode_rows.decode(2, 4, 2, 192),
    "decode, e4m3 by key": lambda: gpu_decode_rows.decode(2, 4, 2, 192, torch.float8_e4m3fn, scales="key"),
    "decode, rows": lambda: gpu_decode_rows.decode(2, 4, 2, 192, rows=4),
    "paged": lambda: gpu_decode_rows.paged(2, 4, 2, 192, 16),
    "4 bits": lambda: gpu_decode_rows.decode_int4(2, 4, 2, 256),
    "gradients": lambda: gpu_backward_rows.batched(1, 64, 4, 2, 64, True),
    "forward and backward": lambda: gpu_backward_rows.python_call(64),
    "encode": lambda: gpu_lowbit_rows.encode(128, 256, "nvfp4"),
    "encode, scale given": lambda: gpu_lowbit_rows.encode(128, 256, "nvfp4", "plain", 1e-2),
    "decode weights": lambda: gpu_lowbit_rows.decode(128, 256, "int4_g128_zp"),
    "blocks": lambda: gpu_block_sparse_rows.blocks(384, 64, 128, 50),
    "blocks, gradients": lambda: gpu_block_sparse_rows.blocks(256, 64, 64, 10, backward=True),
    "nsa": lambda: gpu_nsa_rows.forward(192, 8, 2, 0),
    "nsa gradients": lambda: gpu_nsa_rows.backward(192, 8, 2, 64),
    "nsa gradients, no window": lambda: gpu_nsa_rows.backward(192, 8, 2, 0),
    "nsa shared": lambda: gpu_nsa_rows.shared(192, 8, 2, "fast", "forward"),
    "nsa shared, compression too": lambda: gpu_nsa_rows.shared(192, 8, 2, "seed_4_3", "backward"),
    "nsa shared, gradients": lambda: gpu_nsa_rows.shared(192, 8, 2, "seed", "backward"),
    "nsa shared, no window": lambda: gpu_nsa_rows.shared(192, 8, 2, "fast", "forward", 0, beside_fla=True),
    "nsa decode": lambda: gpu_nsa_rows.decode(2, 192, 8, 2),
    **{
        f"nsa {name}, {direction}": lambda name=name, direction=direction: gpu_nsa_rows.part(192, 8, 2, name, direction)
        for name in gpu_nsa_rows.PARTS
        for direction in ("forward", "backward")
        if (name, direction) != ("selection", "backward")
    },
} | {f"option {name}": lambda name=name: gpu_rows.option(name, 256, 800) for name in gpu_rows.OPTIONS}


@pytest.mark.parametrize("name", SMALL)
def test_rows_are_made_compared_and_timed(name):
    row = bench.measure(name, SMALL[name])
    assert "wrong" not in row, row["wrong"]
    assert 0 <= row["difference"]["heddle"] <= row["limit"] and row["rates"]["heddle"] > 0 and row["sources"]


def test_native_sparse_attention_that_differs_has_no_time(monkeypatch):
    gpu_nsa_rows.agreement.cache_clear()
    whole = heddle.nsa.parallel_nsa
    monkeypatch.setattr(heddle.nsa, "parallel_nsa", lambda *x, **options: 1.1 * whole(*x, **options))
    wrong = bench.measure("r", SMALL["nsa"])["wrong"]
    assert float(re.search("heddle differs by ([0-9.]+),", wrong)[1]) == pytest.approx(0.1, abs=0.01), wrong
    gpu_nsa_rows.agreement.cache_clear()


def test_blocks_that_differ_have_no_time(monkeypatch):
    gpu_block_sparse_rows.agreement.cache_clear()
    whole = heddle.sparse_attention
    monkeypatch.setattr(heddle, "sparse_attention", lambda *x, **options: 1.1 * whole(*x, **options))
    wrong = bench.measure("r", SMALL["blocks"])["wrong"]
    assert float(re.search("heddle differs by ([0-9.]+),", wrong)[1]) == pytest.approx(0.1, abs=0.01), wrong
    gpu_block_sparse_rows.agreement.cache_clear()


@pytest.mark.parametrize("scale, absent", [(1.0, None), (1.2, "its output differs by ")])
def test_others_over_blocks_are_raced_where_they_can_be_imported(scale, absent, monkeypatch):
    caches = (gpu_peers._imported, gpu_block_sparse_rows.agreement)
    for cached in caches:
        cached.cache_clear()

    def attended(q, k, v, named, row, column):  # [H, S, D], [H, rows, columns]
        mask = named.repeat_interleave(row, 1).repeat_interleave(column, 2)
        scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
        return scale * scores.softmax(-1) @ v

    class Wrapper:
        def __init__(self, memory):
            pass

        def plan(self, named, of_rows, of_columns, heads, kv_heads, size, q_data_type):
            self.named, self.sizes = named, (int(of_rows[0, 0]), int(of_columns[0, 0]))

        def run(self, q, k, v):
            return attended(q, k, v, self.named, *self.sizes)

    def block_sparse_attn_func(
        q, k, v, starts_q, starts_k, by_mask, streaming, named, longest_q, longest_k, dropout, is_causal
    ):
        assert by_mask.tolist() == [1] * q.shape[1] and starts_k.tolist() == [0, longest_k] and not is_causal
        return attended(*(x.transpose(0, 1) for x in (q, k, v)), named[0], 128, 128).transpose(0, 1)  # fmt: skip

    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(VariableBlockSparseAttentionWrapper=Wrapper))
    module = types.SimpleNamespace(block_sparse_attn_func=block_sparse_attn_func)
    monkeypatch.setitem(sys.modules, "block_sparse_attn", module)
    row = bench.measure("r", SMALL["blocks"])
    gradients = bench.measure("r", lambda: gpu_block_sparse_rows.blocks(256, 64, 128, 50, backward=True))
    for cached in caches:
        cached.cache_clear()
    assert "wrong" not in row and "wrong" not in gradients, (row, gradients)
    assert "flashinfer" in gradients["absent"]
    for name, found in (("flashinfer", row), ("block_sparse_attn", row), ("block_sparse_attn", gradients)):
        if absent is None:
            assert found["rates"][name] > 0 and found["difference"][name] <= found["limit"]
        else:
            assert name not in found["rates"] and found["absent"][name].startswith(absent)


@pytest.fixture
def forgotten():
    """What is imported, and agreed, is asked anew before and after."""
    caches = (gpu_peers._imported, gpu_nsa_rows.agreement)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("scale, absent", [(1.0, None), (1.2, "its output differs by ")])
@pytest.mark.parametrize("name", ["nsa", "nsa gradients", "nsa shared, no window"])
def test_flash_linear_attention_is_raced_where_it_can_be_imported(name, scale, absent, forgotten, monkeypatch):
    whole = heddle.nsa.parallel_nsa

    def parallel_nsa(q, k, v, g_cmp=None, g_slc=None, g_swa=None, block_indices=None, block_counts=16, block_size=64,
                     window_size=0, scale=None, cu_seqlens=None):  # fmt: skip
        assert block_indices is None or block_indices.dtype == torch.int64
        return factor * whole(q, k, v, g_cmp, g_slc, g_swa, block_indices, block_counts, block_size, window_size)

    factor = scale
    module = types.SimpleNamespace(parallel_nsa=parallel_nsa, flash_attn_func=lambda: None)
    monkeypatch.setitem(sys.modules, "fla.ops.nsa.parallel", module)
    row = bench.measure("r", SMALL[name])
    assert "wrong" not in row, row["wrong"]
    if absent is None:
        assert row["rates"]["fla"] > 0 and row["difference"]["fla"] <= gpu_nsa_rows.LIMIT and row["rival"] == "fla"
    else:
        assert "fla" not in row["rates"] and row["absent"]["fla"].startswith(absent)


def test_flash_linear_attentions_window_is_flashattention_3s(forgotten, monkeypatch):
    module = types.SimpleNamespace(parallel_nsa=lambda *x: "called", flash_attn_func=None)
    monkeypatch.setitem(sys.modules, "fla.ops.nsa.parallel", module)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    x = gpu_nsa_rows.operands(1, 128, 4, 2)
    assert gpu_nsa_rows.fla(x, 64) == {} and gpu_nsa_rows.fla(x, 0)["fla"]() == "called"
    row = bench.measure("r", SMALL["nsa gradients"])
    assert row["absent"]["fla"] == "its window needs flash_attn or FlashAttention-3, which are not here"
    gpu_peers._imported.cache_clear()
    of_fa3 = types.SimpleNamespace(flash_attn_func=lambda: None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", of_fa3)
    assert gpu_nsa_rows.fla(x, 0)["fla"]() == "called" and module.flash_attn_func is None
    assert gpu_nsa_rows.fla(x, 64)["fla"]() == "called" and module.flash_attn_func is of_fa3.flash_attn_func


def test_native_sparse_attention_remembers_memory_of_the_forward(monkeypatch):
    monkeypatch.setattr(bench, "peak_mib", lambda call: call().numel())
    row = bench.measure("r", lambda: gpu_nsa_rows.memory(192, 8, 2, 0, backward=False))
    assert row["unit"] == "MiB" and row["rates"]["heddle"] == 192 * 8 * 128 and "milliseconds" not in row
    names = gpu_nsa_rows.rows()
    for name in ("memory of forward 64/4", "memory of forward 32/8", "64/4 fast forward",
                 "64/4 window 512 seed_4_3 forward", "64/4 window 512 seed_4_3 backward"):  # fmt: skip
        assert f"nsa {name} S65536" in names


def test_native_sparse_attention_of_a_file(monkeypatch, tmp_path):
    x = dict(zip(("q", "k", "v", "g_cmp", "g_slc", "g_swa"), gpu_nsa_rows.operands(1, 128, 4, 2)))
    monkeypatch.setattr(torch, "load", lambda path, **options: x)
    monkeypatch.setattr(gpu_nsa_rows, "TENSORS", tmp_path / "layer.pt")
    made = {name: make for name, make in gpu_nsa_rows.rows().items() if "layer" in name}
    assert list(made) == [f"nsa layer 4/2{w} {d} S128" for w in ("", " window 512") for d in ("forward", "backward")]
    row = bench.measure("r", made["nsa layer 4/2 forward S128"])
    assert row["rates"]["heddle"] > 0 and row["absent"].keys() >= {"fla"}


def test_a_rival_that_waits_for_the_gpu_is_absent(monkeypatch):
    def race(contenders):
        if "fla" in contenders:
            raise gpu_timing.TimingError("the call waits for the GPU")
        return {name: [1.0] * 3 for name in contenders}, dict.fromkeys(contenders, 3)

    monkeypatch.setattr(gpu_timing, "race", race)
    row = bench.measure("r", made({"heddle": lambda: ONES, "fla": lambda: ONES, "cudnn": lambda: ONES}))
    assert row["absent"] == {"fla": "the call waits for the GPU"} and set(row["rates"]) == {"heddle", "cudnn"}


def test_a_reference_knows_causality_from_the_bottom_right_and_groups():
    q, k, v = torch.randn(2, 20, 4, 32), torch.randn(2, 50, 2, 32), torch.randn(2, 50, 2, 32)
    options = {
        "softcap": 3.0,
        "alibi_slopes": torch.rand(4),
        "bias": torch.randn(1, 4, 20, 50),
        "mask": torch.rand(2, 1, 1, 50) < 0.9,
        "sink": torch.randn(4),
    }
    found = heddle.attention(q, k, v, causal="bottom_right", window=(9, -1), **options)
    expected = gpu_reference.sampled(gpu_reference.Attention(q, k, v, causal=True, left=9, **options))
    assert gpu_reference.from_expected(found, expected) < 1e-5
    wrong = gpu_reference.sampled(gpu_reference.Attention(q, k, v, causal=True, left=10, **options))
    assert gpu_reference.from_expected(found, wrong) > 1e-2


class TestFlashAttention3:
    @pytest.fixture
    def module(self, monkeypatch):
        """Its signatures, and heddle's results."""

        def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
                            attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False):  # fmt: skip
            assert all(x is None or x.shape == (q.shape[0], k.shape[2]) for x in (q_descale, k_descale, v_descale))
            window = (window_size[0], -1 if causal else window_size[1])
            return heddle.attention(q, k, v, causal="bottom_right" if causal else "none", window=window)

        def flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q=None,
            seqused_k=None,
            softmax_scale=None,
            causal=False,
        ):
            return heddle.attention(q, k, v, causal="bottom_right" if causal else "none", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                                    max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)  # fmt: skip

        def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                                    cache_leftpad=None, page_table=None, cu_seqlens_q=None, causal=False):  # fmt: skip
            return heddle.attention(
                q, k_cache, v_cache, causal="bottom_right", seqused_k=cache_seqlens, page_table=page_table
            )

        found = types.SimpleNamespace(
            flash_attn_func=flash_attn_func,
            flash_attn_varlen_func=flash_attn_varlen_func,
            flash_attn_with_kvcache=flash_attn_with_kvcache,
        )
        monkeypatch.setitem(sys.modules, "flash_attn_interface", found)
        gpu_peers._imported.cache_clear()
        yield
        gpu_peers._imported.cache_clear()

    @pytest.mark.parametrize(
        "name", ["dense", "window", "documents", "python call", "decode", "decode, rows", "paged", "gradients"]
    )
    def test_it_is_raced_where_it_can_be_imported(self, module, name):
        row = bench.measure(name, SMALL[name])
        assert "wrong" not in row, row["wrong"]
        assert row["rates"]["fa3"] > 0 and "fa3" in gpu_peers.contenders() and "fa3" not in gpu_peers.absent()

    def test_it_is_absent_with_a_reason_where_it_cannot(self):
        gpu_peers._imported.cache_clear()
        assert "flash_attn_interface cannot be imported" in gpu_peers.absent()["fa3"]
        assert "fa3" not in gpu_peers.contenders() and gpu_peers.fa3_dense(ONES, ONES, ONES) == {}


def test_the_codes_of_int4_weights_are_those_that_torch_reads(monkeypatch):
    """torch has the even column in the high four bits, codes less 8, and a scale and a zero for each group."""
    asked = {}
    quantized = heddle.lowbit.quantize(torch.randn(16, 256), "int4_g128")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(
        gpu_peers.torch.ops.aten, "_convert_weight_to_int4pack", lambda codes, tiles: asked.setdefault("codes", codes)
    )
    monkeypatch.setattr(
        gpu_peers.torch.ops.aten,
        "_weight_int4pack_mm",
        lambda x, codes, group, scales: asked.setdefault("scales", scales),
    )
    gpu_peers.int4pack(quantized, 2)(torch.ones(1, 256))
    codes, scales = asked["codes"].int(), asked["scales"].float()  # [N, K / 2], [K / 128, N, 2]
    columns = torch.stack((codes >> 4, codes & 15), dim=-1).reshape(16, 256)
    weights = (columns - 8) * scales[..., 0].T.repeat_interleave(128, 1) + scales[..., 1].T.repeat_interleave(128, 1)
    assert (weights - quantized.dequantize()).norm() < 3e-3 * quantized.dequantize().norm()  # scales are bfloat16 there


def test_a_run_goes_on_where_another_ended(tmp_path):
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file, names in zip(files, (["one", "three"], ["four"])):
        file.write_text(json.dumps({"rows": [{"name": name} for name in names]}))
    rows = dict.fromkeys(("one", "two", "three", "four", "five"), print)
    assert list(bench.left_of(rows, files)) == ["two", "five"] and bench.left_of(rows, []) == rows


def test_old_rows_are_measured_again_in_parts_of_equal_time(tmp_path, monkeypatch, capsys):
    of_now = {"kernel": "k", "sources": sources.digests(("src/cuda/common",))}
    of_then = {"kernel": "k", "sources": {"src/cuda/common": "0"}}
    rows = {
        "new": of_now | {"seconds": 50},
        "others' alone": {"kernel": "", "sources": {}},
        "timed": of_then | {"milliseconds": {"a": [1000.0, 1000.0], "b": [500.0]}, "calls": {"a": 2, "b": 4}},
        "gone": of_then,
        **{f"old {seconds}": of_then | {"seconds": seconds} for seconds in (1, 8, 7, 2)},
        "unknown": {},
        "again": of_then,
    }
    files = [tmp_path / name for name in ("a.json", "b.json")]
    listed = [{"name": name} | row for name, row in rows.items()]
    files[0].write_text(json.dumps({"rows": listed, "wrong": [{"name": "bad"} | of_now, {"name": "mended"}]}))
    files[1].write_text(json.dumps({"rows": [{"name": name} | of_now for name in ("again", "mended")]}))
    old = bench.old_of(files)
    assert old == {"timed": 6, "gone": 0, "old 1": 1, "old 8": 8, "old 7": 7, "old 2": 2, "unknown": 0, "bad": 0}
    made = {name: made_ones for name in (*rows, "bad", "mended", "not measured yet") if name != "gone"}
    parts = [bench.part_of({name: made[name] for name in made if name in old}, i, 2, old) for i in (0, 1)]
    assert [list(part) for part in parts] == [["old 1", "old 8", "old 2", "unknown"], ["timed", "old 7", "bad"]]

    on_a_gpu(monkeypatch)
    monkeypatch.setattr(bench, "known", lambda: made)
    out = tmp_path / "out.json"
    words = ["bench", "--old", *map(str, files), "--out", str(out), "--shard", "1/2", "--filter", "old|timed"]
    monkeypatch.setattr(sys, "argv", words)
    bench.main()
    written = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in written] == ["old 7", "timed"] and all(row["seconds"] >= 0 for row in written)
    assert "as it was called: gone\n" in capsys.readouterr().out
