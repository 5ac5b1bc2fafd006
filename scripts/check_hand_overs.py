#!/usr/bin/env python3
"""Looks in the machine code of Hopper's kernels for shared memory that is given back while it is still being read.

A warp that arrives at a barrier in shared memory (SYNCS.ARRIVE) may let a copy engine write what the warp's own loads (LDS, LDSM) have not
read yet: the engine writes in another proxy, which no barrier orders behind loads that are issued and have not returned. So on no path may
such a load be under way at an arrive: its result must have been waited for, or a fence of the proxies must stand between. KNOWN has those
that may be, since the arrive gives other memory back, or to threads that store. See docs/kernels/handing_over.md.

usage: check_hand_overs.py [--list] FOLDER|OBJECT...      (object files of kernels; of a build folder those that the library has of src/cuda/sm90)
Needs cuobjdump, on the PATH or where CUOBJDUMP says. Exit status 1 if something is found that KNOWN does not explain.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/")
SECOND_WORD = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
LABEL_TARGET = re.compile(r"0x([0-9a-f]+)")
NO_BARRIER = 7

# (kernel's folder, loads, why they may be under way at an arrive)
KNOWN = [
    (
        "attention_fwd",
        r"LDS R",
        "words of the schedule, which a warp stores anew when every reading thread has arrived at work_free",
    ),
    ("sparse_tiles_fwd", r"LDS R", "the same: it is the same kernel, over lists"),
    (
        "attention_fwd_fp8",
        r"LDS R",
        "the same, and scales by token, which warps store anew when every reading thread has arrived at v_free",
    ),
    (
        "attention_decode",
        r"LDS R",
        "factors of rows, which the query warps store anew when every reading thread has arrived at q_free",
    ),
    (
        "attention_bwd",
        r"LDS\.128",
        "P from one warpgroup's registers to the other's: stored anew when every reading thread has arrived at p_free",
    ),
    (
        "select_blocks",
        r"LDS(\.64)? R",
        "words of an item, which a warp stores anew when all that read them have arrived at work_free",
    ),
    ("linear_w4a16", r"LDS(\.\w+)? ", "weights of the stage behind the one that is given back"),
    ("linear_w4a8", r"LDS(\.\w+)? ", "weights of the stage behind the one that is given back"),
]


class Instruction:
    def __init__(self, address, text, high):
        self.address, self.text = address, text
        self.name = next(word for word in text.split() if not word.startswith("@"))
        self.guarded = text.startswith("@")
        # The scheduler's fields: which of six scoreboards this sets when its result is there, and which it waits for.
        self.sets = high >> 46 & 7
        self.waits = high >> 52 & 63
        self.loads = self.name.startswith(("LDS.", "LDSM")) or self.name == "LDS"
        self.arrives = self.name.startswith("SYNCS.ARRIVE")
        self.fences = self.name.startswith("FENCE.VIEW.ASYNC")


def kernels(text):
    """(name, instructions) of each function that cuobjdump shows."""
    name, instructions, pending = None, [], None
    for line in text.splitlines():
        if "Function :" in line:
            if name:
                yield name, instructions
            name, instructions = line.split(":", 1)[1].strip(), []
        elif match := INSTRUCTION.match(line):
            pending = int(match[1], 16), match[2]
        elif pending and (match := SECOND_WORD.match(line)):
            instructions.append(Instruction(*pending, int(match[1], 16)))
            # fence.proxy.async becomes two; without the first (in front of a barrier's making) it waits for no load.
            instructions[-1].fences &= len(instructions) > 1 and instructions[-2].name.startswith("MEMBAR")
            pending = None
    if name:
        yield name, instructions


def successors(instructions):
    """Of each instruction, the numbers of those that may run next."""
    number = {x.address: n for n, x in enumerate(instructions)}
    out = []
    for n, x in enumerate(instructions):
        stem = x.name.split(".")[0]
        following = [n + 1] if n + 1 < len(instructions) else []
        if stem in ("BRA", "JMP", "CALL"):
            target = LABEL_TARGET.findall(x.text.split(stem, 1)[1])
            conditional = x.guarded or len(re.findall(r"\bU?P\d", x.text)) > 0
            out.append(
                [number[int(t, 16)] for t in target[-1:] if int(t, 16) in number]
                + (following if conditional or stem == "CALL" else [])
            )
        elif stem in ("EXIT", "RET", "BRX"):
            out.append(following if x.guarded else [])
        else:
            out.append(following)
    return out


def findings(instructions):
    """(arrive, loads that may be under way at it), where there are any."""
    after = successors(instructions)
    # under way before an instruction: per scoreboard, the loads that set it and have not been waited for
    before = [None] * len(instructions)
    before[0] = frozenset()
    queue = [0]
    while queue:
        n = queue.pop()
        x = instructions[n]
        state = set() if x.fences else {(board, load) for board, load in before[n] if not x.waits >> board & 1}
        if x.loads and x.sets != NO_BARRIER:
            state.add((x.sets, n))
        state = frozenset(state)
        for m in after[n]:
            merged = state if before[m] is None else before[m] | state
            if merged != before[m]:
                before[m] = merged
                queue.append(m)
    for n, x in enumerate(instructions):
        if x.arrives and before[n]:
            loads = sorted(load for board, load in before[n] if not x.waits >> board & 1)
            if loads:
                yield x, [instructions[load] for load in loads]


def known(folder, load):
    return any(folder == where and re.search(rf"\b{pattern}", load.text) for where, pattern, _ in KNOWN)


def objects(paths):
    for path in map(Path, paths):
        yield from sorted(path.glob("**/heddle.dir/cuda/sm90/**/*.cu.o")) if path.is_dir() else [path]


def disassembly(path):
    program = os.environ.get("CUOBJDUMP", "cuobjdump")
    return subprocess.run([program, "-sass", path], check=True, capture_output=True, text=True).stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="what KNOWN explains, too")
    parser.add_argument("objects", nargs="+")
    arguments = parser.parse_args()
    paths = list(objects(arguments.objects))
    arrives, bad = 0, 0
    with ThreadPoolExecutor() as pool:
        for path, text in zip(paths, pool.map(disassembly, paths)):
            folder = path.parent.name
            for _, instructions in kernels(text):
                arrives += sum(x.arrives for x in instructions)
                for arrive, loads in findings(instructions):
                    unknown = [load for load in loads if not known(folder, load)]
                    bad += bool(unknown)
                    if unknown or arguments.list:
                        print(f"{folder}/{path.name} {arrive.address:05x} {arrive.text}")
                        for load in loads:
                            print(f"    {load.address:05x} {load.text}" + ("" if load in unknown else "    (known)"))
    if arrives == 0:
        sys.exit("check_hand_overs.py: there is no arrive in any kernel of " + ", ".join(arguments.objects))
    print(f"{len(paths)} object files, {arrives} arrives, {bad} with loads under way that nothing explains")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
