"""What bench/ranks_gpu.py times of attention over ranks: rows of one long problem, forward and backward, against one GPU and
against torch's own attention over ranks; and packed documents."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
from collections.abc import Callable

import gpu_ranks_peers as peers
import heddle
import heddle.distributed as hd
import sources
import torch
from gpu_ranks_timing import Contender, Failed, medians, race, rate, together
from gpu_reference import distance
from gpu_rows import LIMIT, chosen

HEAD_SIZE = 128
SCHEMES = ("auto", "gather", "ring", "ulysses")
PASSES = ("forward", "backward", "forward and backward")
ONE = "one GPU"
CHUNK = 4096  # rows that are compared at a time, so that none hides behind many others
# -> seconds that a row takes, forward and both passes
LENGTHS = {16384: (3, 6), 32768: (3, 5), 131072: (12, 17), 524288: (24, 80)}
RIVAL_SHAPES = tuple((length, 32, kv_heads) for length in (16384, 65536, 262144) for kv_heads in (32, 8))
LONG = 262144  # from which on what is slower at all lengths is left out
DOCUMENTS = (128, 32768, 262144)  # shortest, longest, tokens in all


@dataclasses.dataclass
class Row:
    """seconds: what it is expected to take, checks included. measure(world): what is kept of it; every rank calls it. said: what the row
    says of itself besides, its group among it."""

    seconds: float
    measure: Callable
    said: dict


def about(q, k, v, of_pass: str, **options) -> dict:
    """The kernels that one GPU gets for a call, and the sources of it all."""
    names, paths = [], {*sources.RANKS}
    for direction in ("forward", "backward"):
        if direction in of_pass:
            backward = direction == "backward"
            names.append(chosen(q, k, v, backward, **options))
            of_gpu = (names[-1], backward) in sources.ATTENTION
            paths |= {*(sources.attention(names[-1], backward) if of_gpu else sources.CPU_ATTENTION)}
    return {"kernel": ", ".join(dict.fromkeys(names)), "sources": sources.digests(paths)}


def random(world, seed: int, *shape: int):
    """bfloat16, the same on every rank."""
    generator = torch.Generator(world.device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=world.device, dtype=torch.bfloat16)


def work(pairs: float, heads: int, of_pass: str) -> float:
    """TFLOP of so many (row, key) pairs of a head: two products forward, five backward."""
    return 2e-12 * {"forward": 2, "backward": 5}.get(of_pass, 7) * pairs * heads * HEAD_SIZE


def call_of(forward: Callable, leaves, weight, of_pass: str) -> Callable:
    """A call of forward() of the leaves, of its backward alone, or of both; the last two return gradients."""
    if of_pass == "forward":
        return forward
    if of_pass == "backward":
        out = forward()
        return lambda: torch.autograd.grad(out, leaves, weight, retain_graph=True)
    return lambda: torch.autograd.grad(forward(), leaves, weight)


def results(forward: Callable, leaves, weight, of_pass: str) -> tuple:
    """The output and, where they are asked for, its gradients: what is compared."""
    out = forward()
    gradients = () if of_pass == "forward" else torch.autograd.grad(out, leaves, weight)
    return (out.detach(), *gradients)


def worst(mine, expected, dim: int) -> float:
    """The largest relative distance of CHUNK rows, which lie along dim; NaN if there is one."""
    parts = zip(mine.split(CHUNK, dim), expected.split(CHUNK, dim), strict=True)
    found = [distance(a, b) for a, b in parts]
    return math.nan if any(math.isnan(x) for x in found) else max(found)


def differences(mine, expected, dim: int) -> float:
    found = [worst(a, b, dim) for a, b in zip(mine, expected, strict=True)]
    return math.nan if any(math.isnan(x) for x in found) else max(found)


class Problem:
    """q, k, v and the gradient of the output, whole on rank 0 and in parts on all; and calls over them."""

    def __init__(self, world, heads: int, kv_heads: int, of_pass: str, plan, packed: bool, options: dict) -> None:
        self.world, self.of_pass, self.plan = world, of_pass, plan
        self.dim = 0 if packed else 1  # along which rows lie
        self.options = options  # of one GPU's call
        lead = (plan.rows,) if packed else (1, plan.rows)
        q, k, v, weight = (
            random(world, n, *lead, h, HEAD_SIZE) for n, h in enumerate((heads, kv_heads, kv_heads, heads))
        )
        self.about = about(q, k, v, of_pass, **options)
        self.whole, self.weight = self._leaves(q, k, v), weight
        self.parts, self.part_weight = {}, {}

    def _leaves(self, *tensors):
        return tuple(x.requires_grad_(self.of_pass != "forward") for x in tensors)

    def add(self, plan) -> None:
        """This rank's rows by a plan."""
        self.parts[plan.digest] = self._leaves(
            *(hd.shard(x.detach(), plan, self.world.rank, dim=self.dim) for x in self.whole)
        )
        self.part_weight[plan.digest] = hd.shard(self.weight, plan, self.world.rank, dim=self.dim)

    def first_alone(self) -> None:
        """The whole goes from all ranks but the first."""
        if self.world.rank:
            self.whole = self.weight = None

    def one(self) -> Callable:
        return lambda: heddle.attention(*self.whole, **self.options)

    def one_results(self) -> tuple:
        return results(self.one(), self.whole, self.weight, self.of_pass)

    def ranks(self, plan, scheme: str) -> Callable:
        q, k, v = self.parts[plan.digest]
        return lambda: hd.attention(q, k, v, plan=plan, scheme=scheme, deterministic=False)

    def ranks_results(self, plan, scheme: str) -> tuple:
        found = results(self.ranks(plan, scheme), self.parts[plan.digest], self.part_weight[plan.digest], self.of_pass)
        return tuple(hd.unshard(x, plan, dim=self.dim) for x in found)

    def contender(self, plan, scheme: str) -> Contender:
        leaves, weight = self.parts[plan.digest], self.part_weight[plan.digest]
        return Contender(call_of(self.ranks(plan, scheme), leaves, weight, self.of_pass))


class Checks:
    """Outputs of contenders beside one GPU's: who differs, or fails, is out of the race, and the row says why."""

    def __init__(self, world, expected, dim: int, limit: float = LIMIT) -> None:
        self.world, self._expected, self._dim, self._limit = world, expected, dim, limit
        self.difference: dict[str, float] = {}
        self.wrong: dict[str, str] = {}  # of Heddle's
        self.absent: dict[str, str] = {}  # of others'

    def passes(self, name: str, make: Callable, own: bool = True) -> bool:
        """make(): the whole's output and gradients, on every rank. What fails on some ranks alone ends this run's processes."""
        out = self.wrong if own else self.absent
        try:
            found = together(self.world, make)
            value = self.world.of_first(
                together(self.world, lambda: differences(found, self._expected, self._dim), alone=True)
            )
        except Failed as failed:
            if not failed.everywhere:
                raise
            out[name] = str(failed)
            return False
        if value <= self._limit:
            self.difference[name] = value
            return True
        out[name] = f"its output differs from one GPU's by {value:.3g}, the limit is {self._limit}"
        return False

    def over(self) -> None:
        """Gives the memory of what was compared with back."""
        self._expected = None

    def told(self) -> dict:
        return {
            "difference": self.difference,
            "limit": self._limit,
            "absent": self.absent,
            "wrong_contenders": self.wrong,
        }


def finished(raced: dict, checks: Checks, of_work: float) -> dict:
    """What a row keeps: TFLOP/s of all GPUs together, and time on one over ranks times the time on them."""
    ms, ranks = medians(raced), checks.world.size
    out = raced | checks.told() | {"unit": "TFLOP/s", "rates": {name: rate(of_work, each) for name, each in ms.items()}}
    if ONE in ms:
        out["efficiency"] = {name: ms[ONE] / (ranks * each) for name, each in ms.items() if name != ONE}
    return out


def causal_plan(world, length: int, heads: int, kv_heads: int):
    return hd.plan(length, world.size, heads=heads, kv_heads=kv_heads, head_size=HEAD_SIZE, causal="top_left")


def scaling(world, length: int, schemes, of_pass: str) -> dict:
    """One GPU, and all with each scheme; "auto" is raced by the name of what it is."""
    plan = causal_plan(world, world.scaled(length), 32, 8)
    problem = together(world, lambda: Problem(world, 32, 8, of_pass, plan, False, {"causal": "top_left"}))
    together(world, lambda: problem.add(plan))
    problem.first_alone()
    named = {plan.scheme if scheme == "auto" else scheme: (plan, scheme) for scheme in schemes}
    told = {"auto": plan.scheme, "predicted_ms": {name: predicted_ms(plan, name, of_pass) for name in named}}
    return told | raced_over_ranks(world, problem, named)


def predicted_ms(plan, scheme: str, of_pass: str) -> float:
    """What the plan thinks that a call takes."""
    cost = plan.cost(scheme)
    each = {"forward": cost.forward_seconds, "backward": cost.backward_seconds}
    return 1e3 * sum(seconds for direction, seconds in each.items() if direction in of_pass)


def raced_over_ranks(world, problem: Problem, schemes: dict) -> dict:
    """schemes: contender -> (plan, scheme)."""
    checks = Checks(world, together(world, problem.one_results, alone=True), problem.dim)
    names = [name for name, of in schemes.items() if checks.passes(name, lambda of=of: problem.ranks_results(*of))]
    checks.over()
    contenders = together(
        world,
        lambda: (
            (
                {ONE: Contender(call_of(problem.one(), problem.whole, problem.weight, problem.of_pass), alone=True)}
                if world.rank == 0
                else {ONE: Contender(lambda: None, alone=True)}
            )
            | {name: problem.contender(*schemes[name]) for name in names}
        ),
    )
    heads = problem.parts[problem.plan.digest][0].shape[-2]
    pairs = sum(problem.plan.pairs(rank) for rank in range(world.size))
    out = finished(race(contenders, world), checks, work(pairs, heads, problem.of_pass))
    return problem.about | out


def lengths() -> tuple[int, ...]:
    """Of packed documents, spread evenly on a log scale."""
    shortest, longest, total = DOCUMENTS
    generator = torch.Generator().manual_seed(0)
    found: list[int] = []
    while (left := total - sum(found)) > 0:
        spread = torch.rand(1, generator=generator).item() * math.log2(longest / shortest)
        found.append(min(int(shortest * 2**spread), left))
    return tuple(found)


def documents(world, of_pass: str) -> dict:
    """Packed documents, dealt out in both orders."""
    each = [max(1, n // (128 if world.rehearsal else 1)) for n in lengths()]
    ends = [0, *itertools.accumulate(each)]
    shape = {"heads": 32, "kv_heads": 8, "head_size": HEAD_SIZE, "causal": "top_left", "cu_seqlens": ends}
    plans = {order: hd.plan(ends[-1], world.size, order=order, **shape) for order in ("per_document", "balanced")}
    starts = torch.tensor(ends, dtype=torch.int32, device=world.device)
    longest = max(each)
    options = {
        "causal": "top_left", "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest,
    }  # fmt: skip
    problem = together(world, lambda: Problem(world, 32, 8, of_pass, plans["balanced"], True, options))
    for plan in plans.values():
        together(world, lambda plan=plan: problem.add(plan))
    problem.first_alone()
    schemes = {
        f"{order} {scheme}": (plan, scheme)
        for order, plan in plans.items()
        for scheme in dict.fromkeys((plan.scheme, "gather", "ulysses"))
    }
    auto = {order: plan.scheme for order, plan in plans.items()}
    balance = {order: plan.balance for order, plan in plans.items()}
    told = {"auto": auto, "balance": balance, "documents": len(each)}
    return told | raced_over_ranks(world, problem, schemes)


def against_torch(world, length: int, heads: int, kv_heads: int, of_pass: str) -> dict:
    """Heddle over ranks and torch's own attention over ranks, in the same rounds; outputs are compared with one GPU's Heddle."""
    plan = causal_plan(world, world.scaled(length), heads, kv_heads)
    problem = together(world, lambda: Problem(world, heads, kv_heads, of_pass, plan, False, {"causal": "top_left"}))
    together(world, lambda: problem.add(plan))
    checks = Checks(world, together(world, problem.one_results, alone=True), problem.dim)
    contenders = {}
    for scheme in dict.fromkeys((plan.scheme, "needed", *(("ring",) if length < LONG else ()))):
        if checks.passes(f"heddle {scheme}", lambda scheme=scheme: problem.ranks_results(plan, scheme)):
            contenders[f"heddle {scheme}"] = together(world, lambda scheme=scheme: problem.contender(plan, scheme))
    with contextlib.ExitStack() as entered:
        contenders |= torchs_contenders(world, problem, checks, entered)
        checks.over()
        if not contenders:
            raise Failed("; ".join(f"{name}: {words}" for name, words in (checks.wrong | checks.absent).items()), True)
        raced = race(contenders, world)
    pairs = sum(plan.pairs(rank) for rank in range(world.size))
    return {"auto": plan.scheme} | problem.about | compared(finished(raced, checks, work(pairs, heads, of_pass)))


def torchs_contenders(world, problem: Problem, checks: Checks, entered: contextlib.ExitStack) -> dict[str, Contender]:
    """Those of torch's back ends and ways of sending keys that run here and agree; why the others do not is in the checks."""
    try:
        theirs = together(
            world, lambda: peers.ContextParallel(world, *problem.whole, problem.of_pass != "forward", [problem.weight])
        )
    except Failed as failed:
        if not failed.everywhere:
            raise
        checks.absent["torch"] = str(failed)
        return {}
    entered.callback(theirs.close)
    problem.first_alone()
    found = {}
    for backend in peers.BACKENDS:
        for rotation in peers.ROTATIONS:
            prepare = peers.prepared(backend, rotation)

            def whole(prepare=prepare) -> tuple:
                prepare()
                return tuple(theirs.whole(*results(theirs.forward, theirs.operands, *theirs.others, problem.of_pass)))

            def contender(prepare=prepare) -> Contender:
                prepare()
                call = call_of(theirs.forward, theirs.operands, *theirs.others, problem.of_pass)
                return Contender(call, prepare=prepare)

            if checks.passes(name := f"torch {backend} {rotation}", whole, own=False):
                found[name] = together(world, contender)
        if found:
            break
    return found


def compared(row: dict) -> dict:
    """With the fastest of Heddle's rates over the fastest of torch's, where there are both."""
    fastest = {
        who: max((r for name, r in row.get("rates", {}).items() if name.startswith(who)), default=None)
        for who in ("heddle", "torch")
    }
    return row | ({"ratio": fastest["heddle"] / fastest["torch"]} if all(fastest.values()) else {})


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def short(length: int) -> str:
    return f"{length // 1024}k"


def rows() -> dict[str, Row]:
    """name -> Row."""
    out = {}
    for length, seconds in LENGTHS.items():
        schemes = SCHEMES if length < max(LENGTHS) else ("auto",)
        for of_pass, expected in zip((PASSES[0], PASSES[2]), seconds):
            out[f"scaling {of_pass} S{short(length)}"] = Row(
                expected,
                lambda world, a=(length, schemes, of_pass): scaling(world, *a),
                {"group": "scaling", "pass": of_pass, "length": length, "heads": 32, "kv_heads": 8},
            )
    for length, heads, kv_heads in RIVAL_SHAPES:
        for of_pass in PASSES[:2]:
            out[f"torch {of_pass} S{short(length)} {heads}/{kv_heads}"] = Row(
                6 if length < LONG else 15 if of_pass == PASSES[0] else 32,
                lambda world, a=(length, heads, kv_heads, of_pass): against_torch(world, *a),
                {"group": "torch", "pass": of_pass, "length": length, "heads": heads, "kv_heads": kv_heads},
            )
    for of_pass in (PASSES[0], PASSES[2]):
        out[f"documents {of_pass} S{short(DOCUMENTS[2])}"] = Row(
            10,
            lambda world, of_pass=of_pass: documents(world, of_pass),
            {"group": "documents", "pass": of_pass, "length": DOCUMENTS[2], "heads": 32, "kv_heads": 8},
        )
    return out
