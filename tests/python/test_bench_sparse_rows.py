"""Rows of the GPU benchmark of lists of key blocks and of native sparse attention, on the CPU: each is compared, and one that is
wrong has no time."""

import sys
import types

import pytest
from bench_kit import (  # noqa: F401  cpu is a fixture
    bench,
    cpu,
    gpu_block_sparse_rows,
    gpu_nsa_part_rows,
    gpu_nsa_rows,
    gpu_peers,
    heddle,
    torch,
)

SMALL = {
    "blocks": lambda: gpu_block_sparse_rows.blocks(384, 64, 128, 50),
    "blocks, gradients": lambda: gpu_block_sparse_rows.blocks(256, 64, 64, 10, backward=True),
    "nsa": lambda: gpu_nsa_rows.forward(256, 4, 2, 0),
    "nsa gradients": lambda: gpu_nsa_rows.backward(256, 4, 2, 64),
    "nsa gradients, no window": lambda: gpu_nsa_rows.backward(256, 4, 2, 0),
    "nsa shared": lambda: gpu_nsa_rows.shared(256, 4, 2, "fast", "forward"),
    "nsa shared, compression too": lambda: gpu_nsa_rows.shared(256, 4, 2, "seed_4_3", "backward"),
    "nsa shared, gradients": lambda: gpu_nsa_rows.shared(256, 4, 2, "seed", "backward"),
    "nsa shared, no window": lambda: gpu_nsa_rows.shared(256, 4, 2, "fast", "forward", 0, beside_fla=True),
    "nsa decode": lambda: gpu_nsa_rows.decode(2, 256, 4, 2),
    **{
        f"nsa {name}, {direction}": lambda name=name, direction=direction: gpu_nsa_part_rows.part(
            256, 4, 2, name, direction
        )
        for name in gpu_nsa_part_rows.PARTS
        for direction in ("forward", "backward")
        if (name, direction) != ("selection", "backward")
    },
}


@pytest.mark.parametrize("name", SMALL)
def test_rows_are_made_compared_and_timed(name):
    row = bench.measure(name, SMALL[name])
    assert "wrong" not in row, row["wrong"]
    assert row["difference"].keys() == row["rates"].keys() and row["rates"]["heddle"] > 0 and row["sources"]
    assert all(0 <= value <= row["limit"] for value in row["difference"].values())


@pytest.mark.parametrize("name", SMALL)
def test_what_is_timed_is_what_is_compared(name):
    row = SMALL[name]()
    right = row.calls["heddle"]

    def off(x):
        return x * (1 + 4 * row.limit) if x.is_floating_point() else x.flip(1)

    def wrong(*turn):
        found = right(*turn)
        return tuple(off(x) for x in found) if isinstance(found, tuple) else off(found)

    row.calls["heddle"] = wrong
    assert "the output of heddle differs by" in bench.measure("r", lambda: row)["wrong"]


def test_what_takes_under_100_us_goes_by_graphs(monkeypatch):
    made = gpu_nsa_part_rows.rows()
    captured = gpu_nsa_part_rows.part(128, 4, 2, "pooled keys", "backward")
    assert captured.how == "graph" and captured.calls["heddle"].stream is not None
    assert len([name for name in made if "pooled keys" in name]) == 8 and len(made) == 44
    monkeypatch.setattr(gpu_nsa_part_rows, "FEW", 128 * 4)
    for heads, direction, how in ((4, "forward", "graph"), (8, "forward", "queued"), (4, "backward", "queued")):
        assert gpu_nsa_part_rows.part(128, heads, 2, "compressed", direction).how == how


def test_a_contender_that_is_compared_with_nothing_has_no_time():
    row = SMALL["nsa"]()
    row.calls["another"] = row.calls["heddle"]
    assert bench.measure("r", lambda: row)["wrong"] == "Wrong: another: compared with nothing"


def test_gates(monkeypatch):
    """The kernel is a GPU's alone."""
    monkeypatch.setattr(torch.ops.heddle, "gate_branches", gated, raising=False)
    for direction in ("forward", "backward"):
        row = bench.measure("r", lambda direction=direction: gpu_nsa_part_rows.gates(96, 4, 2, direction))
        assert "wrong" not in row and row["difference"]["heddle"] <= row["limit"], row
    monkeypatch.setattr(torch.ops.heddle, "gate_branches", lambda os, gates: gated(os[::-1], gates), raising=False)
    for direction in ("forward", "backward"):
        assert (
            "differs by"
            in bench.measure("r", lambda direction=direction: gpu_nsa_part_rows.gates(96, 4, 2, direction))["wrong"]
        )


def gated(os, gates):
    return sum(g[..., None] * o.float() for o, g in zip(os, gates)).to(os[0].dtype)


@pytest.mark.parametrize("scale, absent", [(1.0, None), (1.2, "its output differs by ")])
def test_others_over_blocks_are_raced_where_they_can_be_imported(scale, absent, monkeypatch):
    gpu_peers._imported.cache_clear()

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
    gpu_peers._imported.cache_clear()
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
    row = bench.measure("r", lambda: gpu_nsa_rows.memory(256, 4, 2, 0, backward=False))
    assert row["unit"] == "MiB" and row["rates"]["heddle"] == 256 * 4 * 128 and "milliseconds" not in row
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
