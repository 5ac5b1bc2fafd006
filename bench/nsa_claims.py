"""What a document claims of odd rows that copy even ones, beside what is counted and measured (docs/nsa.md, the claims of sharing).

  python bench/nsa_claims.py [--quick] [--out FILE]

Of native sparse attention plain, with the preset "seed" (odd rows copy the selected branch and the window) and with "seed_4_3"
(the compressed branch, too): products and traffic are counted from the lists at hand, times are medians of calls in turn in
one run, memory is what a fresh process grew by at its peak. By Heddle's kernels and by the naive functions in torch.
The figures go to bench/results/nsa-claims-<model>-<SIMD class>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import cpu_conditions
import heddle
import heddle.nsa
import sources
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from demo import isolate

FORMS = ("plain", "seed", "seed_4_3")
FUNCTIONS = ("kernels", "naive")
#: The selected branch over given lists; the whole without gradients; the whole with them.
STAGES = ("selected", "inference", "training")
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Case:
    """The document's shape, but for its window."""

    T: int = 2048
    H: int = 32
    Hkv: int = 8
    D: int = 128
    blocks: int = 16
    block: int = 64
    window: int = 512

    @property
    def group(self) -> int:
        return self.H // self.Hkv

    def sharing(self, form: str) -> dict:
        return {} if form == "plain" else heddle.nsa.presets(self.group)[form]


QUICK = Case(T=256, H=4, Hkv=2, D=32, blocks=2, block=32, window=64)


def operands(case: Case, gradients: bool) -> list[torch.Tensor]:
    """q, k, v and the gates g_cmp, g_slc, g_swa: random normals, and their sigmoids."""
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(1, case.T, *shape, generator=generator)  # noqa: E731
    x = [normal(case.H, case.D), normal(case.Hkv, case.D), normal(case.Hkv, case.D)]
    x += [torch.sigmoid(normal(case.H)) for _ in range(3)]
    return [y.requires_grad_() for y in x] if gradients else x


def chosen(case: Case) -> torch.Tensor:
    """Each row's list, [1, T, Hkv, blocks]."""
    q, k = operands(case, False)[:2]
    return heddle.nsa.select_blocks(q, heddle.nsa.pool_keys(k, case.block), case.blocks, block_size=case.block)


# ------------------------------------------------------------------------------------------------------------- counted


def pairs(case: Case, lists: torch.Tensor) -> dict[str, torch.Tensor]:
    """branch -> pairs of a query head and a key that each row meets, [T]."""
    t = torch.arange(case.T)
    begin = lists[0].long() * case.block
    keys = ((begin + case.block).clamp(max=t[:, None, None] + 1) - begin).clamp(min=0)
    selected = torch.where(lists[0] >= 0, keys, 0).sum((1, 2)) * case.group
    return {
        "cmp": (t + 1).div(case.block, rounding_mode="floor") * case.H,
        "slc": selected,
        "swa": (t + 1).clamp(max=case.window) * case.H,
    }


def computed(case: Case, form: str) -> dict[str, torch.Tensor]:
    """branch -> whether each row computes it, [T]; else it copies."""
    even = torch.arange(case.T) % 2 == 0
    copied = case.sharing(form).get("share_branches", ())
    return {branch: even if branch in copied else torch.ones_like(even) for branch in ("cmp", "slc", "swa")}


def counted(case: Case, form: str, met: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """branch -> FLOPs (two a multiply-add) and bytes of float32, of all, even and odd rows. Traffic: a row that is computed reads
    its q and the keys and values that it meets, once for each key/value head, and writes its output; one that copies reads
    an output and writes it."""
    out = {}
    row = case.H * case.D * FLOAT
    for branch, mine in computed(case, form).items():
        if branch == "swa" and case.window == 0:
            continue
        flops = torch.where(mine, met[branch] * 4 * case.D, 0)
        traffic = torch.where(mine, met[branch] // case.group * 2 * case.D * FLOAT, 0) + 2 * row
        out[branch] = {
            f"{what} {rows}": float(x[part].sum())
            for what, x in (("flops", flops), ("bytes", traffic))
            for rows, part in (("all", slice(None)), ("even", slice(0, None, 2)), ("odd", slice(1, None, 2)))
        }
    return out


# ------------------------------------------------------------------------------------------------------------ measured


def call(case: Case, function: str, stage: str, form: str, x: list[torch.Tensor], lists: torch.Tensor):
    """A call without arguments."""
    q, k, v, g_cmp, g_slc, g_swa = x
    rest = dict(block_size=case.block, window_size=case.window, **case.sharing(form))
    if stage == "selected":
        if function == "kernels":
            forward = lambda: heddle.nsa.parallel_nsa(q, k, v, None, g_slc, g_swa, lists, case.blocks, **rest)  # noqa: E731
        else:
            forward = lambda: heddle.nsa.naive_nsa(q, k, v, g_slc, g_swa, lists, case.blocks, **rest)  # noqa: E731
    elif function == "kernels":
        forward = lambda: heddle.nsa.parallel_nsa(*x, None, case.blocks, **rest)  # noqa: E731
    else:
        forward = lambda: heddle.nsa.naive_nsa_with_compression(*x, case.blocks, **rest)  # noqa: E731
    if stage != "training":
        return forward

    def both():
        o = forward()
        return torch.autograd.grad(o, x, torch.ones_like(o), allow_unused=True)

    return both


def timed(case: Case, function: str, stage: str, lists: torch.Tensor, rounds: int) -> dict[str, float]:
    """form -> median seconds; forms in turn, after a call of each."""
    x = operands(case, stage == "training")
    calls = {form: call(case, function, stage, form, x, lists) for form in FORMS}
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for n in range(rounds + 1):
        for form in FORMS if n % 2 else FORMS[::-1]:
            begin = time.perf_counter()
            calls[form]()
            if n:
                times[form].append(time.perf_counter() - begin)
    return {form: statistics.median(each) for form, each in times.items()}


def grown(case: Case, function: str, stage: str, form: str, threads: int) -> int:
    """Bytes of one call beside its operands, the second of a process of its own."""
    torch.set_num_threads(threads)
    heddle.set_num_threads(threads)
    isolate.fresh_pages()
    lists = chosen(case)
    run = call(case, function, stage, form, operands(case, stage == "training"), lists)
    run()
    with isolate.Residence() as residence:
        kept = run()
    del kept
    return residence.grown


def errors(case: Case, lists: torch.Tensor) -> dict[str, dict[str, float]]:
    """form -> how far even and odd rows are from those of plain native sparse attention, of their root mean square."""
    x = operands(case, False)
    plain = call(case, "kernels", "inference", "plain", x, lists)()
    out = {}
    for form in FORMS[1:]:
        change = call(case, "kernels", "inference", form, x, lists)() - plain
        parts = {"even": slice(0, None, 2), "odd": slice(1, None, 2)}
        out[form] = {name: float(change[:, part].norm() / plain[:, part].norm()) for name, part in parts.items()}
    return out


def measure(case: Case, rounds: int, threads: int) -> dict:
    """A result's row."""
    lists = chosen(case)
    met = pairs(case, lists)
    row: dict = {"name": f"window {case.window}", "case": vars(case), "counted": {}, "seconds": {}, "bytes": {}}
    row["counted"] = {form: counted(case, form, met) for form in FORMS}
    for function in FUNCTIONS:
        for stage in STAGES:
            name = f"{function} {stage}"
            row["seconds"][name] = timed(case, function, stage, lists, rounds if function == "kernels" else 2)
            row["bytes"][name] = {form: isolate.call(grown, case, function, stage, form, threads) for form in FORMS}
            shown = ", ".join(f"{form} {s:.3f} s {row['bytes'][name][form] / 2**20:.0f} MiB"
                              for form, s in row["seconds"][name].items())  # fmt: skip
            print(f"{row['name']}, {name}: {shown}", flush=True)
    row["errors"] = errors(case, lists)
    row["sources"] = {path: sources.digest(path) for path in sources.CPU_NSA}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small case, one round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    heddle.set_num_threads(arguments.threads)
    conditions = cpu_conditions.conditions(arguments.threads)
    out = arguments.out
    if out is None and not arguments.quick:
        name = cpu_conditions.file_name("nsa-claims", conditions["cpu"], conditions["simd"], conditions["held"])
        out = sources.ROOT / "bench" / "results" / name
    case = QUICK if arguments.quick else Case()
    rows = []
    for window in (0, case.window):
        rows.append(measure(Case(**{**vars(case), "window": window}), 1 if arguments.quick else 7, arguments.threads))
    conditions["load_average_after"] = os.getloadavg()[0]
    if out is not None:
        out.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"written to {out}")


if __name__ == "__main__":
    main()
