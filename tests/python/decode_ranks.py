"""Runs decoding over a cache that is spread over processes: what test_distributed_decode.py asks.

usage: decode_ranks.py RESULTS.json
"""

import os
import sys
import time
from dataclasses import dataclass, field
from unittest import mock

import distributed_ranks
import heddle
import heddle.distributed as hd
import torch
import torch.distributed as dist
from distributed_ranks import DEVICE, SECONDS
from heddle.distributed.ranks import Ranks, all_gather_of_torch
from ranks_kit import copies_over_gloo


@dataclass
class Case:
    """Keys of some sequences, dealt out to ranks, and what decode() is told besides."""

    name: str
    rows: int = 1
    lengths: tuple = (37, 5, 64)
    heads: tuple = (6, 2)
    sizes: tuple = (16, 24)
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    paged: bool = False
    in_turn: bool = False  # key j goes to rank j % P; else each rank has a range, and rank 1 of several none
    causal: str = "none"
    window: tuple = (-1, -1)
    options: dict = field(default_factory=dict)
    sink: bool = False
    alibi: bool = False


def cases():
    return [
        Case("plain"),
        Case("paged_half", paged=True, dtype=torch.float16),
        Case("in_turn_paged", in_turn=True, paged=True, rows=2, causal="top_left"),
        Case("rows_causal_sink_softcap", rows=4, causal="top_left", sink=True, options=dict(softcap=3.0, scale=0.4)),
        Case("window_sink", rows=2, causal="top_left", window=(19, 0), sink=True),
        Case("window_alone_in_turn", rows=3, in_turn=True, window=(11, 0)),
        Case("alibi_bfloat16", alibi=True, dtype=torch.bfloat16, heads=(4, 4), sizes=(32, 32)),
        Case("cache_in_8_bits", paged=True, dtype=torch.bfloat16, fp8=True, sizes=(32, 32)),
        Case("no_keys_sink", lengths=(0, 3, 0), sink=True),
        Case("no_keys", lengths=(0, 3, 0)),
    ]


def exact(case, q, keys, values, sink, slopes):
    """out and lse in double, row after row of each sequence."""
    group = case.heads[0] // case.heads[1]
    outs, lses = [], []
    for b, length in enumerate(case.lengths):
        k, v = (x[b, :length].double().repeat_interleave(group, 1) for x in (keys, values))
        distance = torch.arange(length)[None, :] - (torch.arange(case.rows) + length - case.rows)[:, None]
        distance = distance.to(q.device)
        scores = torch.einsum("ihd,jhd->hij", q[b].double(), k) * case.options.get("scale", case.sizes[0] ** -0.5)
        if cap := case.options.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        if slopes is not None:
            scores = scores - slopes.double()[:, None, None] * distance.abs()
        attended = torch.ones_like(distance, dtype=torch.bool)
        if case.causal != "none":
            attended &= distance <= 0
        left, right = case.window
        if left >= 0:
            attended &= (distance >= -left) & (distance <= right)
        scores = scores.masked_fill(~attended, -torch.inf)
        if sink is not None:
            scores = torch.cat((scores, sink.double()[:, None, None].expand(-1, case.rows, 1)), -1)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - torch.where(lse.isinf(), 0, lse)[..., None])[..., :length]
        outs.append(torch.einsum("hij,jhd->ihd", weights, v))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def own_keys(case, rank, ranks):
    """Of each sequence the positions of a rank's keys, and (key_offset, key_step)."""
    if case.in_turn:
        return [list(range(rank, n, ranks)) for n in case.lengths], (rank, ranks)
    holders = [r for r in range(ranks) if r != 1]
    own = []
    for n in case.lengths:
        cuts = [0, *(n * (2 * i + 1) // (2 * len(holders)) for i in range(1, len(holders))), n]
        at = holders.index(rank) if rank in holders else None
        own.append([] if at is None else list(range(cuts[at], cuts[at + 1])))
    return own, (torch.tensor([positions[0] if positions else 0 for positions in own], dtype=torch.int32), 1)


def cache_of(case, positions, keys, values):
    """A rank's cache and the arguments that describe it, with NaN wherever no key lies. A rank without keys has one without slots."""
    longest = max(len(own) for own in positions)
    seqused = torch.tensor([len(own) for own in positions], dtype=torch.int32)
    if case.paged:
        size = 4
        pages = -(-longest // size)
        table = torch.randperm(len(positions) * pages).view(len(positions), pages).int()
    caches = []
    for x in (keys, values):
        slots = longest + 3 if longest > 0 and not case.paged else longest
        cache = torch.full((len(positions), slots, *x.shape[2:]), torch.nan, dtype=torch.float32)
        for b, own in enumerate(positions):
            cache[b, : len(own)] = x[b, own].float()
        if case.paged:
            padded = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, pages * size - longest), value=torch.nan)
            cache = torch.empty(len(positions) * pages, size, *x.shape[2:])
            cache[table.flatten().long()] = padded.view(-1, size, *x.shape[2:])
        caches.append(cache.to(x.dtype))
    return caches, dict(seqused_k=seqused, page_table=table if case.paged else None)


def check_case(case, rank, ranks):
    torch.manual_seed(5)
    (heads, kv_heads), size = case.heads, case.sizes[0]
    batch, most = len(case.lengths), max(case.lengths)
    q = torch.randn(batch, case.rows, heads, size).to(DEVICE, case.dtype)
    keys, values = (torch.randn(batch, most, kv_heads, d).to(DEVICE, case.dtype) for d in case.sizes)
    sink = torch.randn(heads).to(DEVICE) if case.sink else None
    slopes = torch.rand(heads).to(DEVICE) if case.alibi else None
    scales = {}
    if case.fp8:
        keys, values = (x.to(torch.float8_e4m3fn) for x in (keys, values))
        scales = dict(k_scale=torch.full((1, 1, kv_heads), 0.5), v_scale=torch.full((1, 1, 1), 2.0))
        scales = {name: x.to(DEVICE) for name, x in scales.items()}
    stands_for = [x.float() * scale for x, scale in zip((keys, values), (0.5, 2.0) if case.fp8 else (1.0, 1.0))]
    right = exact(case, q, *stands_for, sink, slopes)
    seqused = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    options = dict(case.options, alibi_slopes=slopes, sink=sink, window=case.window, return_lse=True, **scales)
    aligned = "none" if case.causal == "none" else "bottom_right"
    one = heddle.attention(q, keys, values, seqused_k=seqused, causal=aligned, **options)

    positions, (key_offset, key_step) = own_keys(case, rank, ranks)
    torch.manual_seed(6 + rank)
    (k_cache, v_cache), told = cache_of(case, positions, keys.cpu(), values.cpu())
    k_cache, v_cache = k_cache.to(DEVICE), v_cache.to(DEVICE)
    told = {name: None if x is None else x.to(DEVICE) for name, x in told.items()}
    if isinstance(key_offset, torch.Tensor):
        key_offset = key_offset.to(DEVICE)
    offsets = dict(q_offset=seqused - case.rows, key_offset=key_offset, key_step=key_step)
    if case.causal == "none" and case.window == (-1, -1) and not case.alibi:
        offsets = dict(key_step=key_step)

    def run(timeout=SECONDS):
        return hd.decode(q, k_cache, v_cache, causal=case.causal, timeout=timeout, **told, **offsets, **options)

    first = run()
    with copies_over_gloo(DEVICE == "cpu"):
        by_copies = run(timeout=None)  # on GPUs that reach each other's memory
    assert all(torch.equal(a, b) for a, b in zip(first, by_copies)), "others' memory is read, and bits differ"
    gather = all_gather_of_torch()
    with (
        mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as sent,
        mock.patch.object(dist, gather.__name__, wraps=gather) as gathered,
    ):
        second = run()
    assert sent.call_count + gathered.call_count == (1 if ranks > 1 else 0), (sent.call_count, gathered.call_count)
    for name, found, again, exactly, single in zip(("out", "lse"), first, second, right, one):
        assert found.dtype == single.dtype and found.shape == single.shape, name
        assert torch.equal(found, again), f"{name}: two runs differ"
        everywhere = [torch.empty_like(found) for _ in range(ranks)]
        dist.all_gather(everywhere, found)
        assert all(torch.equal(found, theirs) for theirs in everywhere), f"{name}: ranks differ"
        assert torch.equal(found.isinf(), exactly.isinf()), name
        finite = ~exactly.isinf()
        assert bool(finite.any()), name
        error, of_one = ((x.double() - exactly)[finite].abs().max().item() for x in (found, single))
        bound = 4 * of_one + 1e-6 * exactly[finite].abs().max().item()
        assert not error > bound, f"{name}: off by {error}, one process by {of_one}"
        assert not error > 0.05, name


def check_steps(rank, ranks):
    """Some steps whose keys go to ranks in turn, against one process with one cache."""
    torch.manual_seed(7)
    prompt = torch.randn(2, 2, 10, 2, 8)
    whole = [torch.zeros(2, 32, 2, 8) for _ in range(2)]
    for cache, x in zip(whole, prompt):
        cache[:, :10] = x
    mine = [torch.zeros(2, 16, 2, 8) for _ in range(2)]
    held = len(range(rank, 10, ranks))
    for cache, x in zip(mine, prompt):
        cache[:, :held] = x[:, rank::ranks]
    for position in range(10, 16):
        q, (k_new, v_new) = torch.randn(2, 1, 4, 8), torch.randn(2, 2, 1, 2, 8)
        seqlens = torch.full((2,), position, dtype=torch.int32)
        one = heddle.attention_with_kv_cache(q, k_new, v_new, *whole, seqlens, causal="bottom_right", window=(7, 0))
        if position % ranks == rank:
            heddle.append_kv_cache(k_new, v_new, *mine, torch.full((2,), held, dtype=torch.int32))
            held += 1
        out = hd.decode(
            q, *mine, torch.full((2,), held, dtype=torch.int32), q_offset=position, key_offset=rank, key_step=ranks,
            window=(7, 0), timeout=SECONDS,
        )  # fmt: skip
        assert torch.allclose(out, one, atol=1e-6), (out - one).abs().max()


def check_collective(rank, ranks):
    """What NCCL is asked for, of gloo: the bits are those of messages from rank to rank."""
    torch.manual_seed(8)
    q = torch.randn(2, 1, 4, 8)
    torch.manual_seed(9 + rank)
    cache = torch.randn(2, 2, 5, 2, 8)
    held = torch.tensor([5, rank], dtype=torch.int32)

    def run(**options):
        return torch.cat([x.flatten() for x in hd.decode(q, *cache, held, return_lse=True, **options)])

    right = run()
    with mock.patch.object(Ranks, "backend", lambda ranks, device: "nccl"):
        assert torch.equal(run(), right)
        assert torch.equal(run(timeout=SECONDS), right)


def check_disagreement(rank, ranks):
    q, cache = torch.zeros(1, 1, 2, 8), torch.zeros(1, 3, 2, 8)
    try:
        hd.decode(q, cache, cache, sink=torch.zeros(2) if rank == 1 else None, timeout=SECONDS)
    except ValueError as error:
        said = str(error)
    assert said == "[distributed.decode] ranks do not agree: sink is 0 on rank 0 and 1 on rank 1", said
    assert hd.decode(q, cache, cache, timeout=SECONDS).shape == q.shape


def check_lost(slow, rank, ranks):
    """The last rank is gone, or slow, before the second step."""
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(1, 3, 2, 8)
    hd.decode(q, cache, cache, timeout=SECONDS)
    dist.barrier()
    if rank == ranks - 1:
        if slow:
            time.sleep(SECONDS)
        os._exit(0)
    begin = time.monotonic()
    try:
        hd.decode(q, cache, cache, timeout=1 if slow else 20)
    except RuntimeError as error:
        text = str(error)
    else:
        raise AssertionError("nothing was said")
    assert time.monotonic() - begin < 15
    assert text.startswith("[distributed.decode] partial results gathered: "), text
    assert f"rank {rank} " in text and f"rank {ranks - 1}, within" in text, text


def worlds():
    of_cases = {case.name: (check_case, (case,)) for case in cases()} | {"steps": (check_steps, ())}
    out = {str(ranks): (ranks, dict(of_cases)) for ranks in (1, 2, 3, 4)}
    out["2"][1]["disagreement"] = (check_disagreement, ())
    out["3"][1]["collective"] = (check_collective, ())
    out["dead"], out["slow"] = ((3, {"lost": (check_lost, (slow,))}) for slow in (False, True))
    out["page"] = (2, {"page": (distributed_ranks.check_page, ("## Decoding over a spread cache",))})
    return out


if __name__ == "__main__":
    distributed_ranks.main(sys.argv[1], worlds())
