"""Writes README's table of what runs where: each option is put to `heddle.explain`, each SIMD target read from its source file.

The package must be installed. With --check nothing is written; the exit status is 1 if the table is not current.
"""

import argparse
import re
import sys
from pathlib import Path

import heddle
import numpy as np
from marked_block import table, update

ROOT = Path(__file__).resolve().parent.parent
B, S, H, HKV, D = 2, 48, 4, 4, 64
PAGES = 16
INT, FLOAT = np.int32, np.float32


def shapes(rows=(B, S), keys=(B, S), heads=H, kv_heads=HKV, d=D, dv=None):
    return (*rows, heads, d), (*keys, kv_heads, d), (*keys, kv_heads, dv or d)


STARTS = np.array([0, 20, S], INT)
PAGED = dict(page_table=np.arange(2 * 3, dtype=INT).reshape(2, 3))
USED = np.array([S, 7], INT)

# What a user asks for: (words, shapes of q, k and v, dtype, options of heddle.attention).
QUESTIONS = [
    ("float32", shapes(), "float32", {}),
    ("float16", shapes(), "float16", {}),
    ("bfloat16", shapes(), "bfloat16", {}),
    ("head size 1", shapes(d=1), "float32", {}),
    ("head size 256", shapes(d=256), "float32", {}),
    ("v of another head size", shapes(d=192, dv=128), "float32", {}),
    ("grouped heads (any group)", shapes(heads=6, kv_heads=2), "float32", {}),
    ("causal, top left", shapes(), "float32", dict(causal="top_left")),
    ("causal, bottom right", shapes(), "float32", dict(causal="bottom_right")),
    ("window", shapes(), "float32", dict(window=(16, 4))),
    ("softcap", shapes(), "float32", dict(softcap=30.0)),
    ("ALiBi", shapes(), "float32", dict(alibi_slopes=np.ones(H, FLOAT))),
    ("additive bias, broadcast", shapes(), "float32", dict(bias=np.zeros((1, H, S, S), FLOAT))),
    ("boolean mask, broadcast", shapes(), "float32", dict(mask=np.ones((B, 1, S, S), bool))),
    ("attention sinks", shapes(), "float32", dict(sink=np.zeros(H, FLOAT))),
    ("dropout", shapes(), "float32", dict(dropout_p=0.1, dropout_seed=1)),
    ("packed sequences (`cu_seqlens`)", shapes(rows=(S,), keys=(S,)), "float32",
     dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS)),
    ("partly used sequences (`seqused`)", shapes(), "float32", dict(seqused_q=USED, seqused_k=USED)),
    ("KV cache, contiguous, rows by index", shapes(keys=(5, S)), "float32",
     dict(cache_batch_idx=np.array([3, 0], INT), seqused_k=USED)),
    ("KV cache, paged, any page size", shapes(keys=(PAGES, 16)), "float32", PAGED),
    ("KV cache, left padding", shapes(), "float32", dict(cache_leftpad=np.array([3, 0], INT))),
]  # fmt: skip

# Column, candidate, whether its gradients are asked for.
COLUMNS = [
    ("`flash` forward", "cpu", False),
    ("`flash` backward", "cpu", True),
    ("`baseline` forward", "cpu_baseline", False),
]


def answer(question, candidate: str, backward: bool) -> tuple[bool, str]:
    _, (q, k, v), dtype, options = question
    try:
        found = heddle.explain(q, k, v, backward=backward, dtype=dtype, **options)
    except ValueError as refusal:
        return False, re.sub(r"^\[\w+\] ", "", str(refusal))
    for one in found:
        if one.name == candidate:
            return one.supported, one.reason
    return False, f"there is no candidate {candidate}"


def options_table() -> str:
    notes: list[str] = []
    rows = [["", *(name for name, _, _ in COLUMNS)]]
    for question in QUESTIONS:
        cells = []
        for _, candidate, backward in COLUMNS:
            supported, reason = answer(question, candidate, backward)
            if not supported and reason not in notes:
                notes.append(reason)
            cells.append("yes" if supported else f"no ({notes.index(reason) + 1})")
        rows.append([question[0], *cells])
    return table(rows) + "".join(f"\n\n({n}) {note}" for n, note in enumerate(notes, 1))


def targets_table() -> str:
    rows = [["CPU target", "what it needs"]]
    for path in sorted((ROOT / "src/cpu/targets").glob("*.cc")):
        text = path.read_text(encoding="utf-8")
        comment = re.match(r"// (.*?)\.?\n", text)
        name = re.search(r'#define HEDDLE_TARGET_NAME "(\w+)"', text)
        rows.append([f"`{name[1]}`", comment[1]])
    return table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the table is not current")
    check = parser.parse_args().check
    current = update(ROOT / "README.md", "support", options_table() + "\n\n" + targets_table(), check=check)
    if not current:
        print("README.md: the support table is not current: run scripts/support_table.py", file=sys.stderr)
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
