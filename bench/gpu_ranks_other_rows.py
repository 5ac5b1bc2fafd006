"""What bench/ranks_gpu.py measures beside attention's speed: memory of a rank, steps of decoding, of training, and the link."""

from __future__ import annotations

import functools
import resource
import sys
from pathlib import Path

import gpu_timing
import heddle
import heddle.distributed as hd
import sources
import torch
import torch.distributed as dist
from gpu_ranks_rows import HEAD_SIZE, ONE, PASSES, Checks, Row, about, causal_plan, clean, finished, random, short
from gpu_ranks_timing import Contender, Failed, graph, medians, race, together
from heddle.distributed.peers import FIRST, peers_of, reach_each_other
from heddle.distributed.ranks import Ranks

ROOT = Path(__file__).resolve().parent.parent
BOTH = PASSES[2]
MESSAGES = {"16 B": 16, "8 MB": 8_000_000, "64 MB": 64_000_000, "512 MB": 512_000_000}
CHECKED_STEPS = 4  # of training, whose losses are compared
TRAINING_LIMIT = 0.05  # of those, and of gradients, into which each layer's roundings go


def peak_mib(world, make) -> float:
    """The most that torch had given out, or could not give out again yet, while make() ran and what it returns was still held, finite
    as it must be."""
    if world.rehearsal:
        held = make()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # of the process, which is not the same
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = make()
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"] / 2**20
    if not all(x.isfinite().all() for x in held):
        raise ValueError("an output is not finite")
    return peak


def memory(world, length: int) -> dict:
    """Peak of forward and backward together, operands, output and all gradients counted, and what is kept for other ranks to write to."""
    plan = causal_plan(world, world.scaled(length), 32, 8)

    def made(rows: int, call) -> tuple:
        operands = [random(world, n, 1, rows, heads, HEAD_SIZE) for n, heads in enumerate((32, 8, 8, 32))]
        leaves, weight = [x.requires_grad_() for x in operands[:3]], operands[3]
        out = call(*leaves)
        return (out, *torch.autograd.grad(out, leaves, weight), *leaves, weight)

    def one():
        return peak_mib(world, lambda: made(plan.rows, lambda q, k, v: heddle.attention(q, k, v, causal="top_left")))

    def ranks(scheme: str, chunked: bool) -> float:
        def call(q, k, v):
            return hd.attention(q, k, v, plan=plan, scheme=scheme, deterministic=False, chunked=chunked)

        hd.release_memory()
        peak = peak_mib(world, lambda: made(plan.rows_of(world.rank), call))
        return peak + hd.kept_memory() / 2**20

    q, k, v = (random(world, 0, 1, 16, heads, HEAD_SIZE) for heads in (32, 8, 8))
    told = about(q, k, v, BOTH, causal="top_left")
    del q, k, v
    clean()
    rates = {ONE: world.of_first(together(world, one, alone=True))}
    for scheme in dict.fromkeys((plan.scheme, "gather", "ring")):
        for chunked in (False, True):
            clean()
            peak = together(world, lambda scheme=scheme, chunked=chunked: ranks(scheme, chunked))
            clean()
            rates[f"{scheme} chunked" if chunked else scheme] = max(world.gathered(peak))
    return told | {"auto": plan.scheme, "unit": "MiB", "rates": rates}


def decode(world, length: int) -> dict:
    """A step over a cache of which each rank has a part; beside each GPU's step over its own part, with nothing exchanged, all at once and
    the slowest counts; and beside one GPU's over all of it. In CUDA graphs."""
    batch, part = (2 if world.rehearsal else 64), world.scaled(length) // world.size
    q = random(world, 0, batch, 1, 32, HEAD_SIZE)

    def caches(rank: int) -> list[torch.Tensor]:
        return [random(world, 1 + 2 * rank + n, batch, part, 8, HEAD_SIZE) for n in range(2)]

    k, v = together(world, lambda: caches(world.rank))
    held = torch.full((batch,), part, dtype=torch.int32, device=world.device)

    def whole() -> list[torch.Tensor]:
        return [torch.cat(parts, 1) for parts in zip(*(caches(rank) for rank in range(world.size)))]

    all_k, all_v = together(world, whole, alone=True) or (None, None)
    all_held = held * world.size
    checks = Checks(
        world, together(world, lambda: (heddle.attention(q, all_k, all_v, seqused_k=all_held),), alone=True), 0
    )

    def ranks() -> torch.Tensor:
        return hd.decode(q, k, v, held)

    if not checks.passes("ranks", lambda: (ranks(),)):
        raise Failed(checks.wrong["ranks"], True)
    told = about(q, k, v, PASSES[0], seqused_k=held)
    try:
        over_ranks = together(world, lambda: graph(ranks, world))
    except Failed as failed:
        if not failed.everywhere:
            raise
        checks.absent["graph"] = str(failed)  # the step is timed without one
        over_ranks = Contender(ranks)
    contenders = {
        "ranks": over_ranks,
        "part": together(world, lambda: graph(lambda: heddle.attention(q, k, v, seqused_k=held), world)),
        ONE: together(
            world, lambda: graph(lambda: heddle.attention(q, all_k, all_v, seqused_k=all_held), world, alone=True)
        ),
    }
    raced = race(contenders, world)
    ms = medians(raced)
    out = finished(raced, checks, 1.0)
    out |= {"unit": "steps/s", "added_us": 1e3 * (ms["ranks"] - ms["part"]), "captured": "graph" not in checks.absent}
    out["efficiency"] = {"ranks": ms[ONE] / (world.size * ms["ranks"])}
    return told | out


@functools.cache
def _example():
    """The modules of examples/train."""
    sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "train")]
    import data
    import train

    import model

    return data, train, model


def training(world, context: int) -> dict:
    """Whole steps of examples/train's model, one sequence each: on one GPU, and with its rows over all."""
    data, train, model = _example()
    length = world.scaled(context)
    shape = model.Shape(layers=2, heads=2, context=length) if world.rehearsal else model.Shape(context=length)
    plan = hd.plan(
        length, world.size, heads=shape.heads, kv_heads=shape.heads, head_size=shape.head_size, causal="top_left"
    )
    if len({plan.rows_of(rank) for rank in range(world.size)}) > 1:
        raise Failed("ranks have different numbers of rows: a mean of their losses is not that of all tokens", True)
    text = together(world, lambda: text_of(data, world))

    class OverRanks(train.Trainer):
        """An unchanged model's attention over all ranks, and gradients averaged over them."""

        def __init__(self, settings):
            super().__init__(settings)
            on = None if world.rehearsal else [world.device]
            self.model = torch.nn.parallel.DistributedDataParallel(self.model, device_ids=on)
            self.positions = torch.from_numpy(plan.position_ids(world.rank)).to(world.device)

        def loss(self, inputs, targets):
            with torch.autocast(world.device.type, torch.bfloat16):
                logits = self.model(inputs, self.positions)
                return torch.nn.functional.cross_entropy(logits.view(-1, model.BYTES), targets.reshape(-1))

        def step(self, number, inputs, targets):
            with hd.sdpa(plan, deterministic=False):
                return super().step(number, inputs, targets)

    def settings(attention: str):
        return train.Settings(attention, "bf16", False, world.device.type, shape, 1, 100)

    def pieces() -> list:
        generator = torch.Generator().manual_seed(1)
        drawn = [data.batch(text, 1, length, generator) for _ in range(CHECKED_STEPS)]
        return [tuple(x.to(world.device) for x in each) for each in drawn]

    own = together(world, lambda: OverRanks(settings("torch")))
    one = together(world, lambda: train.Trainer(settings("heddle")), alone=True)
    batches = together(world, pieces)
    parts = [tuple(hd.shard(x, plan, world.rank) for x in each) for each in batches]

    def learnt(trainer, given) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The losses of these steps, and the gradients of the first: at the start a loss hardly knows what rows attend."""
        losses = [trainer.step(0, *given[0])]
        gradients = [parameter.grad.clone() for parameter in trainer.model.parameters()]
        losses += [trainer.step(number, *each) for number, each in enumerate(given[1:], 1)]
        return torch.stack(losses).double().cpu(), gradients

    expected, gradients = together(world, lambda: learnt(one, batches), alone=True) or (None, ())
    own_losses, own_gradients = together(world, lambda: learnt(own, parts))
    found = torch.stack(world.gathered(own_losses)).mean(0)
    checks = Checks(world, (expected, *gradients), 0, TRAINING_LIMIT)
    if not checks.passes("ranks", lambda: (found, *own_gradients)):
        raise Failed(checks.wrong["ranks"], True)
    checks.over()
    contenders = {
        ONE: Contender(lambda: one.step(0, *batches[0]), alone=True, how="host"),
        "ranks": Contender(lambda: own.step(0, *parts[0]), how="host"),
    }
    out = finished(race(contenders, world), checks, float(length))
    return {
        "sources": sources.digests({*sources.TRAINING, *sources.RANKS}), "auto": plan.scheme,
        "losses": {ONE: None if expected is None else expected.tolist(), "ranks": found.tolist()},
    } | out | {"unit": "tokens/s"}  # fmt: skip


def text_of(data, world) -> torch.Tensor:
    try:
        return data.gather(60 if world.rehearsal else None).train
    except SystemExit as exit:  # it was written as a program
        raise ValueError(str(exit)) from exit


def link(world, size: int) -> dict:
    """Every rank sends so many bytes to the next and receives as many, both at once."""
    size = max(16, size // 1000) if world.rehearsal else size

    def message(rank: int) -> torch.Tensor:
        generator = torch.Generator(world.device).manual_seed(rank)
        return torch.randint(0, 256, (size,), dtype=torch.uint8, device=world.device, generator=generator)

    behind, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    out = together(world, lambda: message(world.rank))
    into = torch.empty_like(out)

    def exchange() -> None:
        moves = [dist.P2POp(dist.isend, out, behind), dist.P2POp(dist.irecv, into, before)]
        for work in dist.batch_isend_irecv(moves):
            work.wait()

    together(world, exchange)
    if not all(world.gathered(torch.equal(into, message(before)))):
        raise Failed("what came is not what was sent", True)
    contenders, absent = {"exchange": Contender(exchange, most=gpu_timing.MOST)}, {}
    ranks = Ranks("link", None, None, None)
    if together(world, lambda: reach_each_other(ranks, out.device)):
        peers = together(world, lambda: peers_of(ranks, out.device, size))

        def engines() -> None:
            peers.begin()
            peers.push([(out, behind, 0, 1)], FIRST, 0)
            peers.await_from(before, FIRST, 0)
            peers.end()

        together(world, engines)
        if not all(world.gathered(torch.equal(peers.room(0, into.shape, into.dtype), message(before)))):
            raise Failed("what came by copy engines is not what was sent", True)
        contenders["copy engines"] = Contender(engines, most=gpu_timing.MOST)
    else:
        absent["copy engines"] = "the ranks' GPUs do not reach each other's memory"
    if size <= 1024:
        contenders["what Python waits for"] = Contender(exchange, how="host")
        try:
            contenders["in a graph"] = together(world, lambda: graph(exchange, world))
        except Failed as failed:
            if not failed.everywhere:
                raise
            absent["in a graph"] = str(failed)
    raced = race(contenders, world)
    rates = {name: size / each / 1e6 for name, each in medians(raced).items()}
    return raced | {"unit": "GB/s", "bytes": size, "rates": rates, "kernel": "", "sources": {}, "absent": absent}


def rows() -> dict[str, Row]:
    """name -> Row."""
    out = {
        f"link {name}": Row(3, lambda world, size=size: link(world, size), {"group": "link", "message": name})
        for name, size in MESSAGES.items()
    }
    heads = {"heads": 32, "kv_heads": 8}
    for length in (8192, 65536):
        out[f"decode B64 32/8 {short(length)}"] = Row(
            8 if length < 65536 else 15,
            lambda world, length=length: decode(world, length),
            {"group": "decode", "batch": 64, "length": length, **heads},
        )
    out["training step S128k"] = Row(30, lambda world: training(world, 131072), {"group": "training", "length": 131072})
    for length, seconds in ((131072, 15), (524288, 70)):
        out[f"memory forward and backward S{short(length)}"] = Row(
            seconds,
            lambda world, length=length: memory(world, length),
            {"group": "memory", "pass": BOTH, "length": length, **heads},
        )
    return out
