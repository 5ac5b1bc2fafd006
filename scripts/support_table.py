"""Writes docs/support.md's tables of what runs where: each option is put to `heddle.explain`, each SIMD target read from its source file.
GPUs are asked for by name, and none need be there.

The package must be installed, built with CUDA. With --check nothing is written; the exit status is 1 if a table is not current.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import heddle
import numpy as np
import torch
from marked_block import table, update

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/support.md"
B, S, H, HKV, D = 2, 48, 4, 4, 64
DECODED = 4  # queries of a sequence
PAGES = 16
INT, FLOAT = np.int32, np.float32
E4M3 = "float8_e4m3fn"
GPUS = {"Ampere": "a100", "Ada": "rtx4090", "Hopper": "h100"}


class Question(NamedTuple):
    """What a user asks for. options: of heddle.attention, or a function of Sq that has them. dtypes: of q, and of k and v."""

    words: str
    options: Any = {}
    dtypes: tuple[str, str] | None = None  # None: the column's
    sizes: tuple[int, int] = (D, D)
    heads: tuple[int, int] = (H, HKV)
    queries: int | None = None  # None: the column's
    packed: bool = False
    keys: tuple[int, ...] = (B, S)


class Column(NamedTuple):
    words: str
    candidates: tuple[str, ...]
    backward: bool = False
    dtype: str = "float32"
    queries: int = S
    options: dict = {}


def starts(rows: int) -> np.ndarray:
    return np.array([0, rows // 2 - 1, rows], INT)


USED = np.array([S, 7], INT)
PLAIN = Question("")
QUESTIONS = [
    Question("float32", dtypes=("float32", "float32")),
    Question("float16", dtypes=("float16", "float16")),
    Question("bfloat16", dtypes=("bfloat16", "bfloat16")),
    Question("head size 1", sizes=(1, 1)),
    Question("head size 256", sizes=(256, 256)),
    Question("v of another head size", sizes=(128, 64)),
    Question("grouped heads (any group)", heads=(6, 2)),
    Question("causal, top left", dict(causal="top_left")),
    Question("causal, bottom right", dict(causal="bottom_right")),
    Question("window", dict(window=(16, 4))),
    Question("softcap", dict(softcap=30.0)),
    Question("ALiBi", dict(alibi_slopes=np.ones(H, FLOAT))),
    Question("additive bias, broadcast", lambda n: dict(bias=np.zeros((1, H, n, S), FLOAT))),
    Question("boolean mask, broadcast", lambda n: dict(mask=np.ones((B, 1, n, S), bool))),
    Question("attention sinks", dict(sink=np.zeros(H, FLOAT))),
    Question("dropout", dict(dropout_p=0.1, dropout_seed=1)),
    Question("packed sequences (`cu_seqlens`)", packed=True, keys=(S,), options=lambda n: dict(
        cu_seqlens_q=starts(n), cu_seqlens_k=starts(S), max_seqlen_q=n, max_seqlen_k=S)),
    Question("partly used sequences (`seqused`)", lambda n: dict(seqused_q=np.array([n, 1], INT), seqused_k=USED)),
    Question("KV cache, contiguous, rows by index", dict(cache_batch_idx=np.array([3, 0], INT), seqused_k=USED), keys=(5, S)),
    Question("KV cache, paged, any page size", dict(page_table=np.arange(2 * 3, dtype=INT).reshape(2, 3)), keys=(PAGES, 16)),
    Question("KV cache, left padding", dict(cache_leftpad=np.array([3, 0], INT))),
    Question("piece of a longer problem (`q_offset`, `key_offset`)", dict(q_offset=3, key_offset=5)),
    Question("rows and keys that stand for several positions (`q_step`, `key_step`)", dict(q_step=2, key_step=3)),
    Question("result in float32 (`out_dtype`) of 16-bit operands", dict(out_dtype="float32"), dtypes=("bfloat16", "bfloat16")),
]  # fmt: skip
COLUMNS = [
    Column("`flash` forward", ("cpu",)),
    Column("`flash` backward", ("cpu",), backward=True),
    Column("`baseline` forward", ("cpu_baseline",)),
]

SCALES = dict(k_scale=np.ones((B, S, HKV), FLOAT), v_scale=np.ones((B, S, HKV), FLOAT))
GPU_QUESTIONS = [
    *QUESTIONS[:3],
    Question("float8_e4m3fn q, k and v", dtypes=(E4M3, E4M3)),
    Question("with a scale for each key", SCALES, dtypes=(E4M3, E4M3)),
    Question("float8_e4m3fn k and v, 16-bit q", dtypes=("bfloat16", E4M3)),
    Question("with a scale for each key", SCALES, dtypes=("bfloat16", E4M3)),
    Question("more than 16 queries a sequence", queries=17),
    Question("head sizes that are no multiples of 8", sizes=(1, 1)),
    Question("head sizes above 128", sizes=(256, 256)),
    *QUESTIONS[5:],
    Question("softcap with ALiBi", dict(softcap=30.0, alibi_slopes=np.ones(H, FLOAT))),
    Question("softcap with a bias", lambda n: dict(softcap=30.0, bias=np.zeros((1, H, n, S), FLOAT))),
    Question("softcap with a mask", lambda n: dict(softcap=30.0, mask=np.ones((B, 1, n, S), bool))),
    Question("drafts to verify (`draft_mask`)", lambda n: dict(draft_mask=np.ones((B, n), INT)), queries=DECODED),
    Question("`batch_invariant`", dict(batch_invariant=True)),
    Question("`deterministic` gradients", dict(deterministic=True)),
]
GPU_COLUMNS = [
    Column("`sm90`", ("sm90",), dtype="bfloat16"),
    Column("`sm90_fp8`", ("sm90_fp8",), dtype=E4M3),
    Column("`sm90_decode`", ("sm90_decode",), dtype="bfloat16", queries=DECODED),
    Column("`sm80`", ("sm80",), dtype="bfloat16"),
    Column("`sm80_int8`", ("sm80_int8",), dtype="bfloat16", options=dict(precision="int8_qk")),
    Column("`sm80_decode`", ("sm80_decode",), dtype="bfloat16", queries=DECODED),
    Column("`baseline_cuda`, `naive_cuda`", ("baseline_cuda", "naive_cuda"), dtype="bfloat16"),
    Column("`sm90` backward", ("sm90",), backward=True, dtype="bfloat16"),
    Column("`sm80` backward", ("sm80",), backward=True, dtype="bfloat16"),
]


def tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def answer(column: Column, question: Question, gpu: str | None = None) -> tuple[bool, str]:
    """Whether the column's candidates take what is asked for, and the sentence of one that may not run."""
    n = question.queries or column.queries
    rows = (n,) if question.packed else (B, n)
    q_dtype, k_dtype = question.dtypes or (column.dtype, column.dtype)
    (d, dv), (heads, kv_heads) = question.sizes, question.heads
    q = tensor((*rows, heads, d), q_dtype)
    k, v = tensor((*question.keys, kv_heads, d), k_dtype), tensor((*question.keys, kv_heads, dv), k_dtype)
    options = question.options(n) if callable(question.options) else question.options
    try:
        found = heddle.explain(q, k, v, backward=column.backward, gpu=gpu, **column.options, **options)
    except ValueError as refusal:
        return False, re.sub(r"^\[\w+\] ", "", str(refusal))
    found = [one for one in found if one.name in column.candidates]
    if len(found) < len(column.candidates):
        sys.exit(f"heddle.explain does not list all of {', '.join(column.candidates)}")
    return all(one.supported for one in found), next((one.reason for one in found if one.reason), "")


def options_table() -> str:
    notes: list[str] = []
    rows = [["", *(column.words for column in COLUMNS)]]
    for question in QUESTIONS:
        cells = []
        for column in COLUMNS:
            supported, reason = answer(column, question)
            if not supported and reason not in notes:
                notes.append(reason)
            cells.append("yes" if supported else f"no ({notes.index(reason) + 1})")
        rows.append([question.words, *cells])
    return table(rows) + "".join(f"\n\n({n}) {note}" for n, note in enumerate(notes, 1))


def gpu_table() -> str:
    """A column's cells name the GPUs that differ from the others that its candidates run on. Rows that are alike are one."""
    homes = [[name for name, gpu in GPUS.items() if answer(column, PLAIN, gpu)[0]] for column in GPU_COLUMNS]
    asked_for = [answer(column, PLAIN, GPUS[home[0]])[1] for column, home in zip(GPU_COLUMNS, homes)]
    words: dict[tuple[str, ...], str] = {}
    for question in GPU_QUESTIONS:
        cells = []
        for column, home in zip(GPU_COLUMNS, homes):
            takes = [name for name in home if answer(column, question, GPUS[name])[0]]
            cells.append("yes" if takes == home else ", ".join(takes) or "no")
        before = words.get(tuple(cells))
        words[tuple(cells)] = question.words if before is None else f"{before}; {question.words}"
    head = [
        ["", *(column.words for column in GPU_COLUMNS)],
        ["GPU", *(", ".join(home) for home in homes)],
        ["runs by itself", *("no" if reason else "yes" for reason in asked_for)],
    ]
    return table([*head, *([row, *cells] for cells, row in words.items())])


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
    if any("without CUDA" in one.reason for one in heddle.explain((1, 1, 1, 8), (1, 1, 1, 8), (1, 1, 1, 8))):
        sys.exit(f"{PAGE}: the table of GPUs cannot be asked for: this heddle was built without CUDA")
    blocks = {"support": options_table() + "\n\n" + targets_table(), "support gpu": gpu_table()}
    current = [update(ROOT / PAGE, name, block, check=check) for name, block in blocks.items()]
    if not all(current):
        print(f"{PAGE}: a support table is not current: run scripts/support_table.py", file=sys.stderr)
    return 0 if all(current) else 1


if __name__ == "__main__":
    sys.exit(main())
