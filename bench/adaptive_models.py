"""What attention with a tolerance does on q, k and v of real models (captured.py): what share of them it replaces, and how far its
results and its bounds lie apart, of every row.

PYTHONPATH=build/release/python python bench/adaptive_models.py [--quick] [--kept FOLDER] [--out FILE]

All-MiniLM-L6-v2 on licences, and the byte model of examples/train, trained here first at each of RATES. Times are not measured, so
the machine may do other things. Shares are of the pairs of a row and a key that it attends:

  replaced  of adaptive_attention, at each of TOLS
  skipped   what could be left out unseen, scores and all, if blocks of keys had an upper bound of their scores: "ball" (the mean of
            the keys and the radius about it) or "box" (the least and the largest of each element); "known" is what their real
            masses would allow. `rows`: each row for itself, from the least bound up, knowing its own sum and result, which an
            implementation does not know before; `runs`: what each of the 12 rows of a run would leave out so.

An error of a row is norm(out - exact) / (the largest norm of a value of its sequence and head), exact in float64. A row is `exceeded`
if its error is above its bound by more than its rounding: what audit_attention allows, or twice what dense attention is off in the
same row. By the former alone: `exceeded_for_the_audit`; and of dense attention so many are off by more, `dense_for_the_audit`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys

import captured
import cpu_conditions
import heddle
import sources
import torch
from captured import Operands
from heddle._options import ADAPTIVE_KEYS, ADAPTIVE_ROWS
from heddle.sparse import options_tuple

TOLS = (0.1, 0.03, 0.01, 0.003)
QUANTILES = (0.5, 0.9, 1.0)
RATIOS = (0.0, 0.1, 0.5, 0.9)  # quantiles of bound / error, of rows whose bound is above their rounding
BLOCKS = (32, 64, 128)  # keys
BOUNDS = ("ball", "box", "known")
ROUNDING = 2.0**-17  # of a row, at least of a tenth of the unit: what audit_attention allows float32
OF_DENSE = 2  # times what dense attention is off in the same row: at scores of 60 a float32's last place alone is 4e-6
SAME = 1e-4  # how far a model's own attention may be from the exact, in float32: else something else was captured
PIECES, TOKENS = 4, 512
MODEL = {"layers": 4, "heads": 4, "context": 1024, "batch": 2, "steps": 450, "precision": "bf16"}
RATES = (6e-4, 2e-3)  # of learning: that of examples/train, and one at which scores grow large
QUICK = {"layers": 2, "heads": 2, "context": 128, "batch": 2, "steps": 2, "files": 60}


def doubles(x: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in float64, [B, H, S, D]."""
    return tuple(part.double().transpose(1, 2) for part in (x.q, x.k, x.v))


def attended(x: Operands) -> torch.Tensor:
    """[S, S]: which key each row attends."""
    every = torch.ones(x.q.shape[1], x.k.shape[1], dtype=torch.bool)
    return every if x.causal == "none" else every.tril()


@dataclasses.dataclass(frozen=True)
class Exact:
    """Of a layer, in float64: probabilities [B, H, S, S]; lse and size [B, H, S]: the length of a row's result, in units of the
    largest value; out [B, H, S, D]; unit [B, H, 1]."""

    probabilities: torch.Tensor
    lse: torch.Tensor
    out: torch.Tensor
    unit: torch.Tensor
    size: torch.Tensor


def exact_of(x: Operands) -> Exact:
    """Raises ValueError if it is not what the model made of its operands: then these are not the attention's."""
    q, k, v = doubles(x)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~attended(x), -torch.inf)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse[..., None]).exp()
    out, unit = probabilities @ v, v.norm(dim=-1).amax(-1, keepdim=True)
    exact = Exact(probabilities, lse, out, unit, out.norm(dim=-1) / unit)
    off = errors_of(exact, x.out).max().item()
    if not off <= SAME:
        raise ValueError(f"layer {x.layer}: the model's own attention is {off:.1e} from that of what was captured")
    return exact


def replaced_pairs(x: Operands, bits: torch.Tensor) -> int:
    """Pairs of a row and a key in the blocks that were replaced. bits: the operator's, [B, H, runs, bytes]; one head a group."""
    rows, keys = x.q.shape[1], x.k.shape[1]
    blocks = (bits[..., None] >> torch.arange(8)) & 1  # bit j % 8 of byte j / 8 is block j
    of_run = (rows - torch.arange(bits.shape[2]) * ADAPTIVE_ROWS).clamp(0, ADAPTIVE_ROWS)
    of_block = (keys - torch.arange(bits.shape[3] * 8) * ADAPTIVE_KEYS).clamp(0, ADAPTIVE_KEYS)
    return int((blocks.flatten(3) * of_run[:, None] * of_block).sum())


@dataclasses.dataclass(frozen=True)
class Judged:
    """Of a layer at a tolerance: pairs replaced and all; of each row its bound, its error, what audit_attention allows its rounding,
    and what dense attention is off in it."""

    replaced: int
    pairs: int
    bound: torch.Tensor
    error: torch.Tensor
    audits: torch.Tensor
    dense: torch.Tensor

    @property
    def rounding(self) -> torch.Tensor:
        return torch.maximum(self.audits, OF_DENSE * self.dense)

    def exceeded(self, rounding: torch.Tensor) -> int:
        """Rows whose error is above their bound by more than this; a bound that is no number holds nothing."""
        return int((~(self.error <= self.bound + rounding)).sum())


def errors_of(exact: Exact, out: torch.Tensor) -> torch.Tensor:
    """[B, H, S], of a result [B, S, H, D]."""
    return (out.double().transpose(1, 2) - exact.out).norm(dim=-1) / exact.unit


def judged(x: Operands, exact: Exact, tol: float) -> Judged:
    options = options_tuple(x.q, {"causal": x.causal})
    with torch.no_grad():
        out, _, bound, bits = torch.ops.heddle.adaptive_attention(x.q, x.k, x.v, tol, "refine", *options)
    dense = heddle.attention(x.q, x.k, x.v, causal=x.causal)
    pairs = int(attended(x).sum()) * x.q.shape[0] * x.q.shape[2]
    return Judged(
        replaced=replaced_pairs(x, bits),
        pairs=pairs,
        bound=bound.double(),
        error=errors_of(exact, out),
        audits=ROUNDING * exact.size.clamp(min=0.1),
        dense=errors_of(exact, dense),
    )


def quantiles(values: torch.Tensor, of: tuple[float, ...]) -> dict[str, float] | None:
    """None of no values."""
    if values.numel() == 0:
        return None
    return {str(q): torch.quantile(values, q).item() for q in of}


def row_of(model: str, tol: float, found: list[Judged]) -> dict:
    names = ("bound", "error", "rounding")
    bound, error, rounding = (torch.cat([getattr(j, name).flatten() for j in found]) for name in names)
    some = bound > rounding  # the others' error is little but rounding
    return {
        "name": f"{model} tol {tol:g}",
        "model": model,
        "tol": tol,
        "rows": bound.numel(),
        "replaced": sum(j.replaced for j in found) / sum(j.pairs for j in found),
        "replaced_by_layer": [j.replaced / j.pairs for j in found],
        "bound": quantiles(bound, QUANTILES),
        "error": quantiles(error, QUANTILES),
        "bound_over_error": quantiles(bound[some] / error[some], RATIOS),
        "exceeded": sum(j.exceeded(j.rounding) for j in found),
        "exceeded_for_the_audit": sum(j.exceeded(j.audits) for j in found),
        "dense_for_the_audit": sum(int((j.dense > j.audits).sum()) for j in found),
        "sources": sources.digests(sources.CPU_ADAPTIVE),
    }


def key_blocks(x: Operands, keys: int) -> list[slice]:
    length = x.k.shape[1]
    return [slice(begin, min(begin + keys, length)) for begin in range(0, length, keys)]


def most_of_scores(x: Operands, keys: int, kind: str) -> torch.Tensor:
    """[B, H, S, blocks]: an upper bound of each row's scores in each block of so many keys."""
    q, k, _ = doubles(x)
    most = []
    for block in key_blocks(x, keys):
        held = k[:, :, block]
        if kind == "ball":
            centre = held.mean(2, keepdim=True)
            reach = q.norm(dim=-1) * (held - centre).norm(dim=-1).amax(-1, keepdim=True)
        else:
            low, high = held.amin(2, keepdim=True), held.amax(2, keepdim=True)
            centre = (low + high) / 2
            reach = (q.abs() @ (high - centre).mT)[..., 0]
        most.append(((q @ centre.mT)[..., 0] + reach) * q.shape[-1] ** -0.5)
    return torch.stack(most, -1)


def most_of_masses(x: Operands, exact: Exact, keys: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, H, S, blocks] both, as shares of each row's sum: at most so much is a block's mass, and that is it. Of a block that a row
    meets in part or not at all the first is infinite."""
    blocks = key_blocks(x, keys)
    mass = torch.stack([exact.probabilities[..., block].sum(-1) for block in blocks], -1)
    if kind == "known":
        most = mass.clone()
    else:
        sizes = torch.tensor([block.stop - block.start for block in blocks])
        most = sizes * (most_of_scores(x, keys, kind) - exact.lse[..., None]).exp()
    seen = attended(x)
    whole = torch.stack([seen[:, block].all(-1) for block in blocks], -1)
    return most.masked_fill(~whole, torch.inf), mass


def skipped(most: torch.Tensor, mass: torch.Tensor, size: torch.Tensor, tol: float) -> torch.Tensor:
    """[B, H, S, blocks]: which blocks a row can leave out unseen within tol, those of the least bound first.

    Without keys that have the share w of a row's sum its result is (out - w m) / (1 - w), m the mean of their values by mass: off by
    w / (1 - w) times |m - out|, which is at most 1 + |out| in units of the largest value. Of w no more is known than the sum of the
    bounds; what is left, 1 - w, is.
    """
    order = most.argsort(dim=-1, stable=True)
    bounds = most.gather(-1, order).cumsum(-1)
    kept = 1 - mass.gather(-1, order).cumsum(-1)
    # Where all keys are left out nothing is kept, and no row either.
    within = (bounds * (1 + size[..., None]) <= tol * kept) & (kept > 0)
    within = within.cumprod(-1).bool()
    return torch.zeros_like(within).scatter(-1, order, within)


def in_runs(left_out: torch.Tensor) -> torch.Tensor:
    """What all rows of a run leave out: runs of 12 rows, [B, H, S, blocks] as given."""
    parts = left_out.split(ADAPTIVE_ROWS, 2)
    return torch.cat([part.all(2, keepdim=True).expand_as(part) for part in parts], 2)


def skipped_pairs(x: Operands, exact: Exact, keys: int, kind: str) -> dict[float, tuple[int, int]]:
    """tol -> pairs left out by rows, and by runs."""
    sizes = torch.tensor([block.stop - block.start for block in key_blocks(x, keys)])
    most, mass = most_of_masses(x, exact, keys, kind)
    found = {}
    for tol in TOLS:
        alone = skipped(most, mass, exact.size, tol)
        found[tol] = tuple(int((mask * sizes).sum()) for mask in (alone, in_runs(alone)))
    return found


def largest_score(x: Operands) -> float:
    q, k, _ = doubles(x)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~attended(x), 0).abs().max().item()


def spread(exact: Exact) -> torch.Tensor:
    """Of each row e to the entropy of its probabilities: among how many keys it would be even."""
    return torch.special.entr(exact.probabilities).sum(-1).exp()


def measured(model: str, layers: list[Operands]) -> tuple[dict, list[dict], list[dict]]:
    """What there is to say of the operands, a row for each tolerance, and one for each bound and size of blocks."""
    found: dict[float, list[Judged]] = {tol: [] for tol in TOLS}
    left_out: dict[tuple[int, str], list[dict]] = {(keys, kind): [] for kind in BOUNDS for keys in BLOCKS}
    even = []
    for x in layers:
        exact = exact_of(x)
        even.append(spread(exact).median().item())
        for tol in TOLS:
            found[tol].append(judged(x, exact, tol))
        for (keys, kind), of_layers in left_out.items():
            of_layers.append(skipped_pairs(x, exact, keys, kind))
    batch, rows, heads, head_size = layers[0].q.shape
    about = {"layers": len(layers), "sequences": batch, "rows": rows, "heads": heads, "head_size": head_size}
    pairs = sum(j.pairs for j in found[TOLS[0]])
    skips = []
    for (keys, kind), of_layers in left_out.items():
        shares = {
            name: {f"{tol:g}": sum(of_layer[tol][n] for of_layer in of_layers) / pairs for tol in TOLS}
            for n, name in enumerate(("rows", "runs"))
        }
        skips.append({"model": model, "keys": keys, "bound": kind, **shares})
    about |= {"causal": layers[0].causal, "median_keys_by_layer": even}
    about |= {"largest_score": max(largest_score(x) for x in layers)}
    return about, [row_of(model, tol, of_layers) for tol, of_layers in found.items()], skips


def trained(quick: bool, rate: float, kept: pathlib.Path | None) -> tuple[list[Operands], dict]:
    file = None if kept is None else kept / f"rate-{rate:g}.pt"
    if file is not None and file.exists():
        return captured.load(file)
    found = captured.language_model(**(QUICK if quick else MODEL), rate=rate, log_every=0 if quick else 100)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        captured.save(file, *found)
    return found


def models(quick: bool, kept: pathlib.Path | None) -> dict[str, tuple[list[Operands], dict]]:
    pieces = captured.pieces(1, 96) if quick else captured.pieces(PIECES, TOKENS)
    of_rates = {f"examples/train, rate {rate:g}": trained(quick, rate, kept) for rate in RATES[: 1 if quick else None]}
    return {"all-MiniLM-L6-v2": captured.encoder(pieces)} | of_rates


def shown(rows: list[dict], skips: list[dict]) -> None:
    for row in rows:
        ratio = row["bound_over_error"]
        print(
            f"{row['name']}: {100 * row['replaced']:.2f} % replaced; largest bound {row['bound']['1.0']:.3g}, error "
            f"{row['error']['1.0']:.3g}; bound / error {'-' if ratio is None else format(ratio['0.5'], '.3g')}; "
            f"{row['exceeded']} of {row['rows']} rows above their bound"
        )
    for row in skips:
        each = ", ".join(f"{tol}: {100 * row['rows'][tol]:.2f} / {100 * row['runs'][tol]:.2f}" for tol in row["rows"])
        print(f"{row['model']} {row['bound']} {row['keys']}: {each} % by rows / runs", flush=True)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="little text and a model that learnt nothing")
    parser.add_argument(
        "--kept", type=pathlib.Path, help="a folder for the language models' q, k and v; read from there if it has them"
    )
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args(given)
    torch.set_num_threads(arguments.threads)
    heddle.set_num_threads(arguments.threads)
    content: dict = {
        "conditions": cpu_conditions.conditions(arguments.threads),
        "models": {},
        "rows": [],
        "skipped": [],
    }
    for model, (layers, more) in models(arguments.quick, arguments.kept).items():
        about, rows, skips = measured(model, layers)
        content["models"][model] = about | more
        content["rows"] += rows
        content["skipped"] += skips
        shown(rows, skips)
    out = arguments.out
    if out is None and not arguments.quick:
        c = content["conditions"]
        name = cpu_conditions.file_name("adaptive-models", c["cpu"], c["simd"], c["held"])
        out = pathlib.Path(__file__).parent / "results" / name
    if out is not None:
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
