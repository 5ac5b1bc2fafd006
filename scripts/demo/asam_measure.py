"""Layers of adaptive sparse attention on the CPU: the public package's algorithm as it stands, and Heddle's layers of its names."""

from __future__ import annotations

from dataclasses import dataclass

from . import isolate, limits, machine, rounds
from .progress import OUT_OF_TIME
from .rounds import FORWARD, GRADIENTS

MODES = ("original", "flash", "flash16", "local")
DTYPES = {"original": "float32", "flash": "float32", "flash16": "bfloat16", "local": "float32"}
BATCHED = MODES[:3]
MOST_BATCH = 64
LIMIT_SECONDS = 20.0  # a call under the limit that is expected to take longer is not tried
TIE = 1.05  # a rate within this factor of the best is as good


@dataclass(frozen=True)
class Form:
    """What is the same in all calls: the public package's defaults."""

    dim: int = 512
    heads: int = 8
    batch: int = 1

    @property
    def head_size(self) -> int:
        return self.dim // self.heads


def original(form: Form):
    """The public ASAMLayer by its formulae: scores of all pairs, a mask over them, two softmaxes joined by the gate.

    Parameters, gate and pattern are those of ``heddle.compat.asam``'s layer, which says the same without the matrices. The mask is made
    once for each length, as in the public package.
    """
    import torch
    from heddle.compat.asam.asam_layer import ASAMConfig, ASAMLayer
    from heddle.compat.asam.sparse_patterns import HierarchicalSparsePattern

    class Original(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = ASAMLayer(ASAMConfig(dim=form.dim, num_heads=form.heads, dim_head=form.head_size, dropout=0.0))
            self.masks: dict = {}

        def mask(self, length: int):
            if length not in self.masks:
                pattern = HierarchicalSparsePattern(length, self.layer.config.scales, form.heads)
                self.masks[length] = pattern.combine_patterns("cpu")
            return self.masks[length]

        def forward(self, x):
            layer, attention = self.layer, self.layer.adaptive_attn
            normed = layer.norm(x)
            q, k, v = attention.to_qkv(normed).unflatten(-1, (3, form.heads, form.head_size)).permute(2, 0, 3, 1, 4)
            gate, _, _ = attention.gate(normed)  # [B, H, T]
            scores = q @ k.transpose(-1, -2) * layer.config.scale
            sparse = scores.masked_fill(~self.mask(x.shape[1]), -torch.inf).softmax(-1) @ v
            dense = scores.softmax(-1) @ v
            o = gate[..., None] * sparse + (1 - gate[..., None]) * dense
            y = x + attention.to_out(o.transpose(1, 2).flatten(2))
            return y + layer.ffn(layer.ffn_norm(y))

    return Original()


def layer(form: Form, mode: str):
    """The layer of a mode, x [B, T, dim] -> y, or a pair that begins with y."""
    import heddle.nn
    import torch
    from heddle.compat.asam.efficient_attention import FlashASAMLayer

    torch.manual_seed(0)
    if mode == "original":
        return original(form)
    if mode == "local":
        config = heddle.nn.ASAMConfig(
            dim=form.dim, num_heads=form.heads, dim_head=form.head_size, dropout=0.0,
            pattern_type="local", use_adaptive_gate=False,
        )  # fmt: skip
        return heddle.nn.ASAMLayer(config)
    return FlashASAMLayer(form.dim, form.heads, dropout=0.0)


def inputs(form: Form, length: int):
    import torch

    return torch.randn(form.batch, length, form.dim, generator=torch.Generator().manual_seed(0))


def runner(form: Form, mode: str, direction: str, x):
    """A call without arguments: y, or y and the gradients of x and of all parameters. 16 bits are autocast's, over float32 weights."""
    import torch

    made = layer(form, mode)
    wide = DTYPES[mode] == "float32"

    def apply(x):
        if wide:
            found = made(x)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = made(x)
        return found[0] if isinstance(found, tuple) else found

    def forward():
        with torch.no_grad():
            return [apply(x)]

    leaf = x.detach().requires_grad_()
    wanted = [leaf, *(parameter for parameter in made.parameters() if parameter.requires_grad)]

    def gradients():
        y = apply(leaf)
        return [y.detach(), *torch.autograd.grad(y.float().sum(), wanted, allow_unused=True)]

    return forward if direction == FORWARD else gradients


class Timer(rounds.Timer):
    """Of the modes of one form."""

    def __init__(self, form: Form, progress, modes: tuple[str, ...] = MODES):
        super().__init__(modes, "", progress)
        self.form = form

    def inputs(self, length: int):
        return inputs(self.form, length)

    def runner(self, mode: str, direction: str, x):
        return runner(self.form, mode, direction, x)

    def needed(self, mode: str, length: int, direction: str) -> int:
        form = self.form
        rows = form.batch * length * form.dim * 4 * (30 if direction == FORWARD else 60)
        pairs = form.batch * form.heads * length**2 * 4 * (4 if direction == FORWARD else 7)
        return rows + (pairs if mode == "original" else 0)

    def work(self, length: int, direction: str) -> float:
        form = self.form
        a_row = 24 * form.dim**2 + 8 * form.dim * length  # projections and feed-forward; two softmaxes of all pairs
        return form.batch * length * a_row * (1 if direction == FORWARD else 3)

    def growth(self, mode: str) -> float:
        return 1.2 if mode == "local" else 2

    def point(self, length: int, direction: str, share: float) -> list[dict]:
        return [
            p | {"dtype": DTYPES[p["method"]], "batch": self.form.batch}
            for p in super().point(length, direction, share)
        ]


def _held(form: Form, mode: str, direction: str, length: int) -> dict:
    """What one call has in memory at its peak, beside x, the weights and the results. In a process of its own."""
    import heddle
    import torch

    isolate.fresh_pages()
    torch.set_num_threads(heddle.num_threads())
    x = inputs(form, length)
    call = runner(form, mode, direction, x)
    # Code pages, threads and their stacks become resident at the first call; they are not what is asked for.
    runner(Form(form.dim, form.heads), mode, direction, inputs(Form(form.dim, form.heads), 2))()
    with isolate.Residence() as residence:
        found = call()
    results = sum(y.numel() * y.element_size() for y in found if y is not None)
    return {
        "length": length, "method": mode, "dtype": DTYPES[mode], "direction": direction, "batch": form.batch,
        "inputs": x.numel() * 4, "output": results, "resident": residence.grown,
        "beside": max(0, residence.grown - results), "resident_how": residence.how,
    }  # fmt: skip


def memory(form: Form, lengths, direction: str, timer: Timer) -> list[dict]:
    """A point for each length and mode."""
    return rounds.memory(timer, lengths, direction, lambda *of: isolate.call(_held, form, *of[:-1], timeout=of[-1]))


def batches(form: Form, length: int, most: int, progress) -> list[dict]:
    """Training at one length with batches of powers of two up to `most`: time and memory of each mode, until time or memory end."""
    points, batch = [], 1
    last: dict = {}
    while batch <= most:
        of = Form(form.dim, form.heads, batch)
        timer = Timer(of, progress, BATCHED)
        timer.last = {key: (length, 2.2 * seconds) for key, seconds in last.items()}
        fair = 0.3 * progress.left() / len(BATCHED)
        fresh = timer.point(length, GRADIENTS, min(1.0, fair))
        last = {(p["method"], GRADIENTS): p["seconds"] for p in fresh}
        held = {p["method"]: p for p in memory(of, [length], GRADIENTS, timer)} if fresh else {}
        points += [p | {"beside": held[p["method"]]["beside"] if p["method"] in held else None} for p in fresh]
        if len(fresh) < len(BATCHED):
            break
        batch *= 2
    return points


def best_batches(points: list[dict]) -> list[dict]:
    """Of each mode the least batch whose rows a second are within TIE of the best, and what twice that batch does."""
    found = []
    for mode in BATCHED:
        own = {p["batch"]: p for p in points if p["method"] == mode}
        if not own:
            continue
        rate = {batch: batch * p["length"] / p["seconds"] for batch, p in own.items()}
        best = min(batch for batch in own if rate[batch] * TIE >= max(rate.values()))
        row = {"method": mode, "batch": best, "rate": rate[best], "beside": own[best]["beside"], "twice": None}
        if 2 * best in own:
            row["twice"] = {"rate": rate[2 * best], "beside": own[2 * best]["beside"]}
        found.append(row)
    return found


def _attempt(form: Form, mode: str, length: int, limit: int) -> dict:
    import torch

    isolate.fresh_pages()
    torch.set_num_threads(1)  # its threads' stacks would count as well
    runner(form, mode, FORWARD, inputs(form, 16))()
    try:
        with isolate.limited_data(limit):
            seconds, _ = isolate.seconds(runner(form, mode, FORWARD, inputs(form, length)))
    except (MemoryError, RuntimeError) as error:
        return {"fits": False, "length": length, "error": f"{type(error).__name__}: {error}"[:200]}
    return {"fits": True, "length": length, "seconds": seconds}


def longest(form: Form, points: list[dict], timer: Timer, limit: int) -> list[dict]:
    """Of each mode the longest sequence whose forward fits in `limit` bytes: computed from the measured memory, then tried, a tenth
    less, under a real limit. That a third more fails is tried, too."""
    import heddle

    progress, found = timer.progress, []
    own = [p | {"workspace": p["beside"]} for p in points if p["direction"] == FORWARD]
    for mode in BATCHED:
        name = f"longest sequence of {mode} in {limit / 2**30:.0f} GiB"
        try:
            bytes_model = limits.model(own, mode, DTYPES[mode])
        except ValueError as error:
            progress.leave_out(name, str(error))
            continue
        entry = {"method": mode, "limit": limit, "longest": limits.longest(bytes_model, limit)}
        for key, factor in (("inside", 0.9), ("beyond", 1.33)):
            length = int(factor * entry["longest"])
            seconds = (
                timer.expected(mode, FORWARD, length) * heddle.num_threads()
            )  # one thread does there what all do here
            if seconds > min(LIMIT_SECONDS, progress.left()) or limit * 1.25 > machine.memory_bytes():
                progress.leave_out(f"{name}, tried with {length} positions", OUT_OF_TIME, length=length)
                continue
            try:
                entry[key] = isolate.call(_attempt, form, mode, length, limit, timeout=120.0)
            except isolate.ChildFailed as failure:
                entry[key] = {"fits": False, "length": length, "error": str(failure)[:200]}
        progress.step(f"{mode}: {entry['longest']} positions in {limit / 2**30:.0f} GiB")
        found.append(entry)
    return found


def agreement(form: Form, length: int = 256) -> float:
    """How far `original` is from ``heddle.compat.asam``'s layer of the same weights: relative (Frobenius)."""
    import torch

    made, x = original(form).eval(), inputs(form, length)
    with torch.no_grad():
        return float((made(x) - made.layer(x)[0]).norm() / made.layer(x)[0].norm())
