"""torch.utils.flop_counter.FlopCounterMode over Heddle's operators, by torch's own formulas."""

import subprocess
import sys

import heddle
import pytest
import torch
from flash_kit import bounds
from heddle import lowbit
from heddle.hosts.when_imported import when_imported
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

B, S, SK, H, HKV, D = 2, 24, 40, 4, 2, 16
LENGTHS = (5, 0, 19), (8, 20, 12)


def _operands(rows=S, keys=SK, packed=False, requires_grad=True):
    lead = () if packed else (B,)
    return [torch.randn(*lead, n, h, D, requires_grad=requires_grad) for n, h in ((rows, H), (keys, HKV), (keys, HKV))]


def _counted(function, *arguments):
    """Of a forward, and of the backward of its first result."""
    with FlopCounterMode(display=False) as forward:
        out = function(*arguments)
    out = out[0] if isinstance(out, tuple) else out
    if not out.requires_grad:
        return forward.get_total_flops(), 0
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def _torchs(rows, keys, sequences=1):
    q, k = torch.Size((sequences, H, rows, D)), torch.Size((sequences, HKV, keys, D))
    return sdpa_flop(q, k, k), sdpa_backward_flop(q, q, k, k)


@pytest.mark.parametrize("causal", ["none", "top_left"])  # torch takes nothing off either
def test_attention(causal):
    assert _counted(lambda *x: heddle.attention(*x, causal=causal), *_operands()) == _torchs(S, SK, B)
    out = torch.empty(B, S, H, D)
    written = lambda *x: heddle.attention(*x, out=out)  # noqa: E731
    assert _counted(written, *_operands(requires_grad=False)) == (_torchs(S, SK, B)[0], 0)
    adaptive = lambda *x: heddle.adaptive_attention(*x, 0.1, causal=causal)  # noqa: E731
    assert _counted(adaptive, *_operands()) == _torchs(S, SK, B)


def test_sdpa_is_counted_as_torchs_math():
    q, k, v = (x.transpose(1, 2).detach() for x in _operands())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        math = torch.nn.functional.scaled_dot_product_attention
        expected, _ = _counted(lambda: math(q, k, v, enable_gqa=True))
    assert _counted(lambda: heddle.sdpa(q, k, v, enable_gqa=True))[0] == expected > 0


def test_packed_sequences():
    cu_q, cu_k = map(bounds, LENGTHS)
    options = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    found = _counted(lambda *x: heddle.attention(*x, **options), *_operands(packed=True))
    each = [_torchs(*lengths) for lengths in zip(*LENGTHS)]
    assert found == tuple(map(sum, zip(*each)))


def test_traced_sequences_are_as_long_as_the_longest():
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        cu_q, cu_k = (torch.empty(4, dtype=torch.int32) for _ in "qk")
        operands = _operands(packed=True, requires_grad=False)
        heddle.attention(*operands, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=19, max_seqlen_k=20)
    assert counter.get_total_flops() == _torchs(19, 20, 3)[0]


def test_used_lengths_and_pages():
    used = torch.tensor([30, 11], dtype=torch.int32)
    expected = _torchs(S, 30)[0] + _torchs(S, 11)[0]
    q, k, v = _operands(requires_grad=False)
    assert _counted(lambda: heddle.attention(q, k, v, seqused_k=used))[0] == expected
    table = torch.arange(B * SK // 8, dtype=torch.int32).reshape(B, -1)
    k, v = (x.reshape(-1, 8, HKV, D) for x in (k, v))
    assert _counted(lambda: heddle.attention(q, k, v, page_table=table, seqused_k=used))[0] == expected
    assert _counted(lambda: heddle.attention(q, k, v, page_table=table))[0] == _torchs(S, SK, B)[0]


def test_over_a_cache():
    q, k, v = _operands(rows=1, keys=1, requires_grad=False)
    cache = torch.zeros(2, B, SK, HKV, D)
    seqlens = torch.tensor([3, 20], dtype=torch.int32)
    found, _ = _counted(lambda: heddle.attention_with_kv_cache(q, k, v, *cache, seqlens))
    assert found == _torchs(1, 4)[0] + _torchs(1, 21)[0]


def test_lists_of_blocks():
    blocks = torch.tensor([[0, 1, -1], [-1, -1, -1], [2, -1, -1]], dtype=torch.int32)[None, :, None].expand(B, 3, 1, 3)
    options = dict(block_size=16, query_rows=8)
    found = _counted(lambda *x: heddle.sparse_attention(*x, blocks, **options), *_operands(keys=48))
    assert found == _torchs(8, 16, 3 * B)  # three entries in each sequence
    counts = torch.tensor([1, 3, 0], dtype=torch.int32)[None, :, None].expand(B, 3, 1)
    found = _counted(lambda *x: heddle.sparse_attention(*x, blocks, counts, **options), *_operands(keys=48))
    assert found == _torchs(8, 16, B)
    csr = dict(offsets=torch.tensor([0, 2, 2, 3], dtype=torch.int32)[None, None].repeat(B, 1, 1))
    entries = torch.tensor([0, 1, 2], dtype=torch.int32)
    found = _counted(lambda *x: heddle.sparse_attention(*x, entries, **csr, **options), *_operands(keys=48))
    assert found == _torchs(8, 16, 3 * B)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_linear(activation):
    packed = lowbit.pack(lowbit.quantize(torch.randn(48, 32), "nvfp4"))
    x = torch.randn(3, 5, 32, requires_grad=True)
    product = 2 * 15 * 48 * 32
    assert _counted(lambda x: lowbit.linear(x, packed, activation=activation), x) == (product, product)


def test_a_counter_made_before_the_first_call_counts_it():
    code = """
import sys, torch, heddle
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
x = torch.randn(1, 3, 2, 8)
with FlopCounterMode(display=False) as counter:
    heddle.attention(x, x, x)
print(counter.get_total_flops())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == str(2 * 2 * 3 * 3 * 16), run.stderr


def test_a_module_that_is_there_is_handed_over_at_once_and_another_when_it_comes(tmp_path, monkeypatch):
    seen = []
    when_imported("subprocess", seen.append)
    assert seen == [subprocess]
    (tmp_path / "comes_later_to_heddle.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    when_imported("comes_later_to_heddle", lambda module: seen.append(module.value))
    import comes_later_to_heddle  # noqa: F401

    assert seen == [subprocess, 3] and sys.meta_path == before
