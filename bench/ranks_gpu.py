"""Attention over the GPUs of one machine against one of them, and against torch's own attention over ranks, in one run.

  python bench/ranks_gpu.py --seconds 540                 # starts a process for each of two GPUs
  python bench/ranks_gpu.py --filter 'scaling|link' --out ranks.json
  python bench/ranks_gpu.py --but ranks.json              # the rows that file has not; merge.py joins the two
  python bench/ranks_gpu.py --device cpu --out build/rehearsal.json  # a rehearsal over gloo, small; no table takes it

How everything is timed: gpu_ranks_timing.py. Rows come by what they are expected to take, the longest last; one for which
--seconds leaves too little is left out, which is said. Outputs are compared with one GPU's first. A contender whose output
differs, or that fails, has no time, and is listed as wrong where it is Heddle's; the run then ends with status 1. The file,
bench/results/ranks-<gpu>.json if --out names no other, is written after each row. Where the processes die of a row, it is kept
as wrong, and new ones go on behind it. Started by torchrun, it is one rank's process and no more.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import time
import traceback

import gpu_conditions
import gpu_ranks_other_rows
import gpu_ranks_rows
import gpu_ranks_timing as timing
import torch

RANKS = 2
AGAIN = 3  # status of processes of which one may wait for another: new ones go on
BROKEN = 4  # of one that lost the others, or its way
RESTARTS = 6


def known() -> dict[str, gpu_ranks_rows.Row]:
    """name -> Row, the longest last."""
    rows = gpu_ranks_rows.rows() | gpu_ranks_other_rows.rows()
    return dict(sorted(rows.items(), key=lambda item: item[1].seconds))


def chosen(rows: dict, words: str, done) -> dict:
    """Those of the rows whose names contain one of the words, a|b, without those that are done."""
    return {
        name: row for name, row in rows.items() if name not in done and any(part in name for part in words.split("|"))
    }


class Budget:
    """Seconds from now on: a row is begun if what it is expected to take is left."""

    def __init__(self, seconds: float, clock=time.monotonic) -> None:
        self._end, self._clock = clock() + seconds, clock

    @property
    def left(self) -> float:
        return self._end - self._clock()

    def allows(self, row) -> bool:
        return row.seconds <= self.left


class Report:
    """A results file that is whole at all times."""

    def __init__(self, path: pathlib.Path, resumed: bool = False) -> None:
        self.path = path
        self.content: dict = {"conditions": {}, "rows": [], "wrong": []}
        if resumed and path.exists():
            self.content |= json.loads(path.read_text(encoding="utf-8"))

    def names(self) -> set[str]:
        return {row["name"] for kind in ("rows", "wrong") for row in self.content[kind]}

    def begin(self, name: str) -> None:
        self._write(running=name)

    def add(self, row: dict, conditions: dict) -> None:
        """A row with `wrong` has no figures; of one with `wrong_contenders`, these have none, and stand among the wrong besides."""
        self.content["conditions"] = conditions
        if "wrong" in row:
            self.content["wrong"].append(row)
        else:
            self.content["rows"].append(row)
            for contender, words in row.get("wrong_contenders", {}).items():
                self.content["wrong"].append({"name": f"{row['name']}, {contender}", "wrong": words})
        self._write()

    def died(self, words: str) -> str | None:
        """The row that was running is wrong; its name."""
        name = self.content.pop("running", None)
        if name is not None:
            self.content["wrong"].append({"name": name, "wrong": words})
            self._write()
        return name

    def _write(self, **more) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps(self.content | more, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)


@functools.cache
def topology() -> str:
    return asked("topo", "-m")


def asked(*words: str) -> str:
    """What nvidia-smi says, or nothing where there is none."""
    try:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def link_of_topology(text: str) -> str:
    """How the first two GPUs are joined, by `nvidia-smi topo -m`: NV18 is 18 links of NVLink."""
    found = re.search(r"^GPU0\s+X\s+(\S+)", text, re.MULTILINE)
    return found[1] if found else "unknown"


def conditions(world) -> dict:
    common = {
        "ranks": world.size, "torch": torch.__version__, "commit": gpu_conditions.commit(), "date": gpu_conditions.now(),
        "method": timing.METHOD,
    }  # fmt: skip
    if world.rehearsal:
        return {"rehearsal": timing.REHEARSAL, "gpu": "none"} | common
    clocks = asked("--query-gpu=clocks.sm", "--format=csv,noheader").split("\n")
    maximum, power, driver = gpu_conditions.query("clocks.max.sm,power.limit,driver_version").split(", ")
    return {
        "gpu": torch.cuda.get_device_name(), "driver": driver, "sm_clocks": clocks[: world.size], "sm_clock_maximum": maximum,
        "power_limit": power, "link": link_of_topology(topology()), "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(), "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "contenders": ["heddle", "torch context_parallel"], "absent": {},
    } | common  # fmt: skip


def shown(row: dict) -> str:
    """One line: what each came to in the row's unit, and what follows from it."""
    if "wrong" in row:
        return f"{row['name']:38} WRONG: {row['wrong']}"
    unit = row["unit"]
    digits = 0 if unit in ("TFLOP/s", "MiB", "tokens/s") else 1
    parts = []
    for name, rate in row["rates"].items():
        times = row.get("milliseconds", {}).get(name)
        took = "" if times is None else f" ({statistics.median(times):.4g} ms)"
        share = row.get("efficiency", {}).get(name)
        parts.append(f"{name} {rate:.{digits}f}{took}" + ("" if share is None else f" T1/PTp {share:.3f}"))
    beside = f"  ratio {row['ratio']:.2f}" if "ratio" in row else ""
    beside += f"  ranks add {row['added_us']:.1f} us" if "added_us" in row else ""
    felt = [name for name, how in row.get("timed", {}).items() if how == "host"]
    beside += f"  as the host felt it: {', '.join(felt)}" if felt else ""
    missing = {**row.get("absent", {}), **row.get("wrong_contenders", {})}
    beside += "".join(f"\n{'':38}   without {name}: {why}" for name, why in missing.items())
    return f"{row['name']:38} {'  '.join(parts)} {unit}{beside}"


def sound() -> bool:
    """Gives back what a row had. Whether the GPU still answers: after some errors it does not, for as long as the process lives."""
    try:
        gpu_ranks_rows.clean()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def run_rank(options) -> int:
    """One rank's process: all rows, in step with the others."""
    world = timing.World(options.device)
    report = Report(options.out, options.resume)
    done = world.of_first(
        {*report.names(), *(name for file in options.but for name in Report(file, resumed=True).names())}
    )
    budget, left_out = Budget(options.seconds), []
    for name, row in chosen(known(), options.filter, done).items():
        if not world.of_first(budget.allows(row)):
            left_out.append(name)
            continue
        begun = time.monotonic()
        if world.rank == 0:
            report.begin(name)
        everywhere = True
        try:
            found = timing.together(world, lambda row=row: row.measure(world))
        except timing.Failed as failed:
            found, everywhere = {"wrong": str(failed)}, failed.everywhere
        found = {"name": name} | row.said | found | {"took": round(time.monotonic() - begun, 1)}
        if world.rank == 0:
            report.add(found, conditions(world))
            print(shown(found), f" [{found['took']:.0f} s]", flush=True)
        if not everywhere or not all(world.gathered(sound())):
            os._exit(AGAIN)  # an exchange may be under way that never ends, or a GPU has given this process up
    if world.rank == 0:
        for name in left_out:
            print(f"{name:38} left out: {known()[name].seconds:.0f} s were not left", flush=True)
        print("written to", options.out, flush=True)
    world.close()
    return 1 if world.rank == 0 and report.content["wrong"] else 0


def start(arguments: list[str], ranks: int) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Hosts talk on this machine alone, whatever its name is; a rank that is lost ends the others without a record of their exchanges.
    unless_said = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"} | dict(os.environ)
    return [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**unless_said, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


def ended(processes: list[subprocess.Popen], patience: float = 15.0) -> list[int]:
    """Their statuses, once all have ended; what has not, so many seconds after the first has, is ended."""
    first = None
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(0.1)
            if first is None and any(process.poll() is not None for process in processes):
                first = time.monotonic()
            if first is not None and time.monotonic() - first > patience:
                break
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        statuses = [process.wait() for process in processes]
    return statuses


def supervise(options) -> int:
    """Starts the ranks' processes, and others in their place where they die of a row."""
    budget, resumed = Budget(options.seconds), options.resume
    for _ in range(RESTARTS + 1):
        given = ["--device", options.device, "--filter", options.filter, "--out", str(options.out)]
        given += ["--seconds", str(budget.left)] + (["--resume"] if resumed else [])
        given += ["--but", *map(str, options.but)] if options.but else []
        statuses = ended(start(given, RANKS))
        if statuses[0] in (0, 1):  # rank 0 is through, and has written everything
            return statuses[0]
        report = Report(options.out, resumed=True)
        name = report.died(f"the processes ended with {statuses}")
        if name is None and AGAIN not in statuses:
            print(f"ranks_gpu.py: the processes ended with {statuses} before any row", file=sys.stderr)
            return 2
        if name is not None:
            print(f"{name:38} WRONG: the processes ended with {statuses}", flush=True)
        resumed = True
    print(f"ranks_gpu.py: the processes died {RESTARTS + 1} times", file=sys.stderr)
    return 2


def parsed(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default="", help="only rows whose name contains this; a|b: either")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no row is begun that would take longer")
    parser.add_argument("--out", type=pathlib.Path, help="the results file (default: bench/results/ranks-<gpu>.json)")
    parser.add_argument(
        "--but", type=pathlib.Path, nargs="+", default=[], help="leave out the rows that these results files have"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what --out has")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, with small sizes")
    parser.add_argument("--list", action="store_true", help="the rows and the seconds they are expected to take")
    options = parser.parse_args(arguments)
    options.but = [path.resolve() for path in options.but]
    if options.device == "cpu" and options.out is None and not options.list:
        parser.error("a rehearsal needs --out: it is no result")
    return options


def main() -> int:
    options = parsed()
    if options.list:
        rows = chosen(known(), options.filter, ())
        for name, row in rows.items():
            print(f"{name:38} {row.seconds:4.0f} s")
        print(f"{'all':38} {sum(row.seconds for row in rows.values()):4.0f} s")
        return 0
    if options.device == "cuda" and torch.cuda.device_count() < RANKS:
        print(f"ranks_gpu.py: torch sees {torch.cuda.device_count()} GPUs, {RANKS} are needed", file=sys.stderr)
        return 2
    if options.out is None:
        gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")
        options.out = gpu_conditions.HERE / "results" / f"ranks-{gpu}.json"
    options.out = options.out.resolve()
    if "RANK" not in os.environ:
        return supervise(options)
    try:
        return run_rank(options)
    except BaseException:  # what together() does not take: another status than that of wrong rows
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(BROKEN)


if __name__ == "__main__":
    sys.exit(main())
