"""Native sparse attention on a GPU over lists of any numbers and sequences of any lengths, as a seed draws them, against the
naive functions in float64; and that results amid other memory leave it alone."""

import random

import heddle
import pytest
import torch
from cuda_nsa_kit import EVERY, LIMITS, NAMES, check_call
from heddle import _heddle
from nsa_kit import nsa
from out_kit import check_frame, framed

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

SEEDS = range(32)
INT32 = torch.iinfo(torch.int32)


class Drawn:
    """A call: sequences, shapes, operands, lists."""

    def __init__(self, seed):
        self.draw, self.make = draw, make = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype, self.block = draw.choice(list(LIMITS)), draw.choice([16, 32, 64, 128])
        self.window = draw.choice([0, 1, 17, 200])
        heads, group = draw.choice([1, 2, 3]), draw.randint(1, 16)
        size, v_size = (8 * draw.randint(1, 16) for _ in range(2))
        # Of packed sequences some are empty, shorter than a block, or have keys before their rows.
        self.packed = draw.random() < 0.5
        lengths = [draw.choice([0, 1, 3, draw.randint(1, self.block), draw.randint(1, 300)]) for _ in range(4)]
        before = [draw.choice([0, 0, 1, 70]) if draw.random() < 0.3 else 0 for _ in range(4)]
        if self.packed:
            lengths[draw.randrange(4)] = 40
            rows, keys, batch = sum(lengths), sum(lengths) + sum(before), 1
            starts = [torch.tensor([0, *x]).cumsum(0) for x in (lengths, [a + b for a, b in zip(lengths, before)])]
            self.sequences = dict(cu_seqlens=tuple(x.int().cuda() for x in starts))
        else:
            rows, batch = draw.randint(1, 300), draw.randint(1, 2)
            keys, self.sequences = rows + before[0], {}
        self.aligned = rows == keys
        q, k, v, *gates = (
            torch.randn(batch, n, h, d, generator=make)
            for n, h, d in (
                (rows, heads * group, size),
                (keys, heads, size),
                (keys, heads, v_size),
                *[(rows, heads * group, 1)] * 3,
            )
        )
        gates = [torch.sigmoid(g[..., 0]) for g in gates]
        self.x = [y.to("cuda", self.dtype).requires_grad_() for y in (q, k, v, *gates)]

    def sharing(self):
        if not self.aligned or self.draw.random() < 0.5:
            return {}
        share = self.draw.choice(["selection", "output", "delta"] if self.window else ["selection", "output"])
        return dict(query_stride=self.draw.choice([2, 3, 4, 16]), share=share)

    def lists(self):
        """block_indices and block_counts."""
        q, k = self.x[:2]
        shape, slots = (q.shape[0], q.shape[1], k.shape[2]), self.draw.choice([1, 2, 5, 16])
        blocks = -(-k.shape[1] // self.block)
        drawn = lambda least, end, shape: torch.randint(least, end, shape, generator=self.make)  # noqa: E731
        lists = drawn(-2, blocks + 3, (*shape, slots))
        others = [INT32.max, INT32.min, INT32.max // self.block + 1, k.shape[1] - 1, k.shape[1], blocks - 1, blocks, -1]
        others = torch.tensor(others)[drawn(0, len(others), lists.shape)]
        lists = torch.where(drawn(0, 4, lists.shape) == 0, others, lists)
        way = drawn(0, 4, (*shape, 1))  # as it is, one block again and again, descending, none
        lists = torch.where(way == 1, lists[..., :1], lists)
        lists = torch.where(way == 2, lists.sort(-1, descending=True).values, lists)
        lists = torch.where((way == 3) & (drawn(0, 3, way.shape) == 0), -1, lists)
        counts = self.draw.choice([slots, slots + 3, 10**6, drawn(0, slots + 4, shape)])
        if isinstance(counts, torch.Tensor):
            counts = counts.cuda().to(self.draw.choice([torch.int32, torch.int64]))
        return lists.cuda().to(self.draw.choice([torch.int32, torch.int64])), counts


@pytest.mark.parametrize("seed", SEEDS)
def test_lists_from_outside(seed):
    call = Drawn(seed)
    lists, counts = call.lists()
    given = dict(block_size=call.block, window_size=call.window, **call.sequences, **call.sharing())
    q, k, v, _, g_slc, g_swa = call.x
    x = [q, k, v, g_slc, *([g_swa] if call.window else [])]
    check_call(
        x,
        lambda q, k, v, s, w=None: nsa.parallel_nsa(q, k, v, None, s, w, lists, counts, **given),
        lambda q, k, v, s, w=None: nsa.naive_nsa(q, k, v, s, w, lists, counts, **given),
        ("q", "k", "v", "g_slc", "g_swa"),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_whole(seed):
    """Every block is listed, so that rounding chooses nothing else."""
    call = Drawn(1000 + seed)
    given = dict(block_size=call.block, window_size=call.window, **call.sequences, **call.sharing())
    call.x[5].requires_grad_(call.window > 0)
    check_call(
        call.x,
        lambda *y: nsa.parallel_nsa(*y, block_counts=EVERY, **given),
        lambda *y: nsa.naive_nsa_with_compression(*y, EVERY, **given),
        NAMES,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_results_amid_other_memory(seed):
    call = Drawn(2000 + seed)
    q, k, v = (y.detach() for y in call.x[:3])
    lists = call.lists()[0].clamp(INT32.min, INT32.max).int()
    pooling, at, choice = {}, dict(causal="bottom_right"), {}
    if call.packed:
        q, k, v, lists = (y[0] for y in (q, k, v, lists))
        cu_q, cu_k = call.sequences["cu_seqlens"]
        longest = [int(x.diff().max()) for x in (cu_q, cu_k)]
        pooling = dict(cu_seqlens=cu_k)
        at |= dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest[0], max_seqlen_k=longest[1])
        choice = dict(
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k // call.block,
            seqused_k=cu_k.diff() // call.block,
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1] // call.block + 1,
            q_offset=cu_k.diff() - cu_q.diff(),
        )
    elif k.shape[1] > q.shape[1]:
        choice = dict(q_offset=k.shape[1] - q.shape[1])
    pooled = heddle.nsa.pool_keys(k, call.block, **pooling)
    whole, out = framed(pooled)
    assert nsa.pool_keys(k, call.block, **pooling, out=out) is out
    if not call.packed:  # rows between sequences are nobody's
        check_frame(whole, out, pooled)
    chosen = nsa.select_blocks(q, pooled, 5, block_size=call.block, **choice)
    whole, out = framed(chosen)
    nsa.select_blocks(q, pooled, 5, block_size=call.block, **choice, out=out)
    check_frame(whole, out, chosen)
    assert chosen.min() >= -1 and chosen.max() <= (k.shape[-3] - 1) // call.block
    ordered = chosen.sort(-1).values
    assert not ((ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0)).any(), "a block twice"
    o, lse = heddle.sparse_attention(q, k, v, lists, block_size=call.block, return_lse=True, **at)
    (whole, out), (whole_lse, lse_out) = framed(o), framed(lse)
    given = dict(block_size=call.block, return_lse=True, out=out, lse_out=lse_out, **at)
    heddle.sparse_attention(q, k, v, lists, **given)
    check_frame(whole, out, o)
    check_frame(whole_lse, lse_out, lse)
