"""Runs layers and blocks that processes share: what test_tensor_parallel.py asks.

usage: tensor_ranks.py RESULTS.json
"""

import copy
import os
import sys
import time
from dataclasses import dataclass, field

import distributed_ranks
import heddle.nn
import torch
import torch.distributed as dist
from distributed_ranks import DEVICE, SECONDS
from heddle.nn import ColumnParallelLinear, RowParallelLinear, TensorParallelBlock, TransformerBlock
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


@dataclass
class Case:
    """A block, the formats of its layers, and how ranks share it."""

    name: str
    sizes: tuple  # dim, heads, hidden
    block: dict = field(default_factory=dict)
    formats: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    mask_heads: int = 0


def cases():
    gated = dict(norm="rms_norm", activation="swiglu", bias=False, causal="top_left")
    return [
        Case("layer_norm", (48, 6, 50)),
        Case("grouped_rows", (64, 8, 45), dict(gated, kv_heads=4), sequence_parallel=True),
        Case("norm_last_rows_mask", (48, 6, 32), dict(norm_first=False, activation="relu"), sequence_parallel=True, mask_heads=6),
        Case("mask_of_all_heads", (48, 3, 33), dict(kv_heads=3), mask_heads=1),
        Case("bfloat16_rows", (48, 6, 64), gated, dtype=torch.bfloat16, sequence_parallel=True),
        Case("checkpointing_rows", (48, 6, 20), dict(checkpointing=True), sequence_parallel=True),
        Case("quantized", (128, 4, 96), formats=dict(qkv="nvfp4", out="mxfp4", up="fp8_row", down="int4_g32_zp")),
        Case("quantized_rows", (128, 4, 90), dict(gated, bias=True), dict(qkv="nf4", out="int8_row", up="int4_g64", down="e2m1_row"), sequence_parallel=True),
        Case("quantized_nvfp4", (128, 8, 128), gated, dict.fromkeys(("qkv", "out", "up", "down"), "nvfp4"), dtype=torch.bfloat16),
    ]  # fmt: skip


def whole_block(case):
    """Made anew from the state of another, so that norms and biases are not what they begin as."""
    torch.manual_seed(11)
    dim, heads, hidden = case.sizes
    first, block = (TransformerBlock(dim, heads, hidden, dtype=case.dtype, **case.block) for _ in range(2))
    with torch.no_grad():
        for p in first.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    for name, format in case.formats.items():
        getattr(first, name).quantize(format)
    block.load_state_dict(first.state_dict())
    return block.train()


def results(block, x, d_out, mask):
    """out, and the gradients of x and of all parameters, by name."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    out = block(x, mask=mask)
    out.backward(d_out)
    return dict(out=out.detach(), x=x.grad) | {name: p.grad for name, p in block.named_parameters()}


def check_block(case, rank, ranks):
    whole = whole_block(case)
    dim, rows = case.sizes[0], 4 * ranks
    x, d_out = torch.randn(2, 2, rows, dim).to(case.dtype).unbind()
    mask = None
    if case.mask_heads:
        mask = torch.rand(2, case.mask_heads, rows, rows) < 0.6
        mask[..., 0] = True
    one = results(whole, x, d_out, mask)
    # What 16 bits lose, one process loses too; the weights are the same ones.
    exact = (
        one if case.dtype == torch.float32 else results(copy.deepcopy(whole).float(), x.float(), d_out.float(), mask)
    )

    share = TensorParallelBlock(whole, sequence_parallel=case.sequence_parallel, timeout=SECONDS)
    assert all(getattr(share, name).format == format for name, format in case.formats.items())
    own = slice(rank * rows // ranks, (rank + 1) * rows // ranks) if case.sequence_parallel else slice(None)
    found, again = (results(share, x[:, own], d_out[:, own], mask) for _ in range(2))
    # A rank's share of a block of gradients has the gradients of its share.
    shares = []
    for gradients in (exact, one):
        block = copy.deepcopy(whole).to(gradients["out"].dtype)
        with torch.no_grad():
            for name, p in block.named_parameters():
                p.copy_(gradients[name])
        of_share = dict(TensorParallelBlock(block).named_parameters())
        shares.append({name: gradients[name][:, own] for name in ("out", "x")} | of_share)
    assert found.keys() == shares[0].keys()
    for name, mine in found.items():
        assert torch.equal(mine, again[name]), f"{name}: two runs differ"
        right, single = (of[name].detach() for of in shares)
        assert mine.shape == right.shape and mine.dtype == single.dtype, name
        error, of_one = ((y.float() - right.float()).abs().max().item() for y in (mine, single))
        largest = exact[name].abs().max().item()
        assert largest > 0, name
        assert not error > 2 * of_one + 1e-5 * largest, f"{name}: off by {error} of {largest}, one process by {of_one}"
    return share


def check_layers(rank, ranks):
    """A column-split layer and a row-split one behind it, of odd sizes, of torch's layers and in 4 bits."""
    torch.manual_seed(12)
    first, last = torch.nn.Linear(32, 49), torch.nn.Linear(49, 7)
    x = torch.randn(5, 32)
    up, down = ColumnParallelLinear(first, timeout=SECONDS), RowParallelLinear(last, timeout=SECONDS)
    assert torch.allclose(down(torch.tanh(up(x)), residual=x[:, :7]), last(torch.tanh(first(x))) + x[:, :7], atol=1e-5)
    assert up.out_features == down.in_features == 49 // ranks + (rank < 49 % ranks)
    wide = heddle.nn.Linear(112, 8, format=None).quantize("nvfp4")
    split = RowParallelLinear(wide, timeout=SECONDS)
    begin = sum(16 * (7 // ranks + (r < 7 % ranks)) for r in range(rank))
    y = torch.randn(3, 112)
    assert torch.allclose(split(y[:, begin : begin + split.in_features]), wide(y), atol=1e-5)


def check_disagreement(rank, ranks):
    """Ranks with other numbers of rows are all told, and go on."""
    layer = ColumnParallelLinear(torch.nn.Linear(8, 8), sequence_parallel=True, timeout=SECONDS)
    try:
        layer(torch.zeros(2 + rank, 8))
    except ValueError as error:
        assert str(error) == "[nn.ColumnParallelLinear] ranks do not agree: rows is 2 on rank 0 and 3 on rank 1", error
    else:
        raise AssertionError("nothing was said")
    assert layer(torch.zeros(2, 8)).shape[0] == 2 * ranks
    last = RowParallelLinear(torch.nn.Linear(8, 8), sequence_parallel=True, timeout=SECONDS)
    try:
        last(torch.zeros(ranks + 1, last.in_features))
    except ValueError as error:
        assert "with sequence_parallel its rows must be a multiple of" in str(error), error
    else:
        raise AssertionError("nothing was said")


def check_refusals(rank, ranks):
    block = TransformerBlock(64, 4, 64, kv_heads=ranks - 1 if 4 % (ranks - 1) == 0 else 1)
    for refused, text in (
        (lambda: TensorParallelBlock(block), f"the block has {block.kv_heads} key/value heads for {ranks} ranks: each must have one"),
        (
            lambda: TensorParallelBlock(TransformerBlock(64, 4, 1)),
            f"the feed-forward's 1 inner values, 1 of which are stored together, are for {ranks} ranks: each must have some",
        ),
        (
            lambda: ColumnParallelLinear(torch.nn.Linear(4, 1)),
            f"[ColumnParallelLinear] the layer has 1 outputs for {ranks} ranks: each must have some",
        ),
        (
            lambda: RowParallelLinear(heddle.nn.Linear(32, 4).quantize("mxfp4")),
            f"[RowParallelLinear] the layer has 32 inputs, 32 of which are stored together, for {ranks} ranks: each must have some",
        ),
    ):  # fmt: skip
        try:
            refused()
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)


def check_lost(rank, ranks):
    """The last rank is gone before the backward; the others are told there."""
    share = TensorParallelBlock(TransformerBlock(32, ranks, 48), timeout=20)
    out = share(torch.randn(1, 4, 32))
    dist.barrier()
    if rank == ranks - 1:
        os._exit(0)
    begin = time.monotonic()
    try:
        out.sum().backward()
    except RuntimeError as error:
        assert str(error).startswith(f"[nn.ColumnParallelLinear] gradients summed: rank {rank} "), error
        assert f"rank {ranks - 1}, within 20 s" in str(error), error
    else:
        raise AssertionError("nothing was said")
    assert time.monotonic() - begin < 15


def check_pipeline(rank, ranks):
    """1F1B by torch's pipelining, a stage of heddle.nn's blocks on each rank, the second in 8 bits where float32 operands are served beside
    them, against one process."""
    torch.manual_seed(13)
    stages = [
        torch.nn.Sequential(*(TransformerBlock(32, 4, 48, causal="top_left") for _ in range(2))) for _ in range(ranks)
    ]
    if DEVICE == "cpu":
        heddle.nn.quantize_model(stages[1], "int8_row")
    x, target = torch.randn(2, 8, 10, 32).unbind()
    loss_of = lambda out, target: ((out - target) ** 2).mean()
    whole = copy.deepcopy(torch.nn.Sequential(*stages))
    out = whole(x)
    loss_of(out, target).backward()

    schedule = Schedule1F1B(
        PipelineStage(stages[rank], rank, ranks, torch.device(DEVICE, rank if DEVICE == "cuda" else None)),
        4,
        loss_fn=loss_of,
    )
    losses = []
    if rank == 0:
        schedule.step(x)
    else:
        found = schedule.step(target=target, losses=losses)
        assert torch.allclose(found, out, atol=1e-5)
        assert len(losses) == 4 and torch.allclose(sum(losses) / 4, loss_of(out, target), atol=1e-5)
    for (name, mine), single in zip(stages[rank].named_parameters(), whole[rank].parameters()):
        assert single.grad.abs().max() > 0, name
        assert not (mine.grad - single.grad).abs().max() > 1e-5 * single.grad.abs().max(), name


def worlds():
    checks = {case.name: (check_block, (case,)) for case in cases()}
    checks |= {"layers": (check_layers, ()), "refusals": (check_refusals, ()), "disagreement": (check_disagreement, ())}
    worlds = {
        "2": (2, checks | {"pipeline": (check_pipeline, ())}),
        "3": (3, checks),
        "dead": (2, {"lost": (check_lost, ())}),
    }
    for name, heading in (("page_blocks", "## Blocks over ranks"), ("page_stages", "## Blocks in stages")):
        worlds[name] = (2, {"page": (distributed_ranks.check_page, (heading,))})
    return worlds


if __name__ == "__main__":
    distributed_ranks.main(sys.argv[1], worlds())
