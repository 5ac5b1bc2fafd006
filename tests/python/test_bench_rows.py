"""Rows of the GPU benchmark, on the CPU: what they are compared with, and what becomes of one that is wrong. No time is looked at."""

import json
import math
import sys
import types

import pytest
from bench_kit import (  # noqa: F401  cpu is a fixture
    bench,
    cpu,
    gpu_backward_rows,
    gpu_decode_rows,
    gpu_lowbit_rows,
    gpu_peers,
    gpu_reference,
    gpu_rows,
    gpu_timing,
    heddle,
    made,
    sources,
    torch,
)


def on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(gpu_peers, "absent", dict)
    monkeypatch.setattr(bench.gpu_conditions, "conditions", lambda method: {"method": method, "date": "d"})


ONES = torch.ones(4, 3)
NAN = torch.full((4, 3), math.nan)


def made_ones():
    return gpu_rows.Row({"heddle": lambda: ONES, "cudnn": lambda: ONES}, 1.0, "calls/s")


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
    both = gpu_reference.Expected(lambda o: o, torch.cat([100 * ONES[:1], ONES[:1]]))
    assert both.worst(small) == pytest.approx(0.5)
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
} | {f"option {name}": lambda name=name: gpu_rows.option(name, 256, 800) for name in gpu_rows.OPTIONS}


@pytest.mark.parametrize("name", SMALL)
def test_rows_are_made_compared_and_timed(name):
    row = bench.measure(name, SMALL[name])
    assert "wrong" not in row, row["wrong"]
    assert 0 <= row["difference"]["heddle"] <= row["limit"] and row["rates"]["heddle"] > 0 and row["sources"]


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
    assert expected.worst(found) < 1e-5
    wrong = gpu_reference.sampled(gpu_reference.Attention(q, k, v, causal=True, left=10, **options))
    assert wrong.worst(found) > 1e-2


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
