"""Writes docs/nsa.md's table of the claims of sharing from the results of bench/nsa_claims.py.

python scripts/nsa_table.py [--check]
"""

from bench_results import ROOT, marked, noted, read, run
from marked_block import table, update

PAGE = ROOT / "docs" / "nsa.md"
SHARED = ("seed", "seed_4_3")
#: The claim, what was said, and where the two kinds of functions have it: seconds as a ratio, bytes as a share saved.
MEASURED = (
    ("speed of the selected branch", "1.8 to 1.9 times", "seconds", "selected"),
    ("speed of inference", "1.8 to 1.9 times", "seconds", "inference"),
    ("speed of training", "1.7 to 1.8 times", "seconds", "training"),
    ("peak memory of the selected branch", "−40 %", "bytes", "selected"),
    ("peak memory of inference", "−32 to −35 %", "bytes", "inference"),
    ("peak memory of training", "−30 %", "bytes", "training"),
)
COUNTED = (
    ("products of the selected branch", "17.2 to 8.6 G, −50 %", "flops", "all", ("slc", "swa")),
    ("products of compression", "2.1 G, the same", "flops", "all", ("cmp",)),
    ("products of odd rows, selected branch", "none", "flops", "odd", ("slc", "swa")),
    ("memory traffic", "−30 to −40 %", "bytes", "all", ("cmp", "slc", "swa")),
    ("memory traffic of even rows", "", "bytes", "even", ("cmp", "slc", "swa")),
    ("memory traffic of odd rows", "", "bytes", "odd", ("cmp", "slc", "swa")),
)


def saved(before, after):
    if before == 0:
        return "–"
    share = 1 - after / before
    return "the same" if abs(share) < 0.005 else f"{'−' if share > 0 else '+'}{abs(share):.0%}".replace("%", " %")


def both(value):
    """What it is for each preset, once if they are alike."""
    words = [value(form) for form in SHARED]
    return words[0] if words[0] == words[1] else " / ".join(words)


def counts(row, what, rows, branches):
    def total(form):
        return sum(of[f"{what} {rows}"] for branch, of in row["counted"][form].items() if branch in branches)

    size = f"{total('plain') / 1e9:.2f} G{'B' if what == 'bytes' else ''}: "
    return size + both(lambda form: saved(total("plain"), total(form)))


def ratio(row, what, function, stage):
    found = row[what][f"{function} {stage}"]
    if what == "bytes":
        return both(lambda form: saved(found["plain"], found[form]))
    return both(lambda form: f"{found['plain'] / found[form]:.2f}")


def claims(content):
    rows = content["rows"]
    windows = [row["name"].removeprefix("window ") for row in rows]
    named = ["no window" if w == "0" else f"window {w}" for w in windows]
    head = ["", "said", *(f"counted, {name}" for name in named)]
    counted = [head]
    for words, said, *what in COUNTED:
        counted.append([words, said, *(counts(row, *what) for row in rows)])
    head = ["", "said", *(f"{function}, {name}" for function in ("kernels", "naive functions") for name in named)]
    measured = [head]
    for words, said, what, stage in MEASURED:
        cells = [ratio(row, what, function, stage) for function in ("kernels", "naive") for row in rows]
        measured.append([words, said, *cells])
    odd = both(lambda form: f"{rows[0]['errors'][form]['odd']:.2f}")
    return f"{table(counted)}\n\n{table(measured)}\n\nOdd rows are off by {odd} of their size on random normals, without a window."


def about(name, content):
    c, case = content["conditions"], content["rows"][0]["case"]
    return (f"**{c['cpu']}, `{c['simd']}`**, {c['threads']} threads, commit {c['commit'][:7]}, {c['date'][:10]}: B 1, T {case['T']}, {case['H']} / {case['Hkv']} heads, D {case['D']}, {case['blocks']} blocks of {case['block']}, float32; "
            f"`seed` / `seed_4_3` where they differ ([`{name}`](../bench/results/{name})).")  # fmt: skip


def block():
    files = read("nsa-claims-*.json")
    if not files:
        return "Not measured yet."
    parts = [marked(about(*file), file[1]["rows"]) + "\n\n" + claims(file[1]) for file in files]
    return noted("\n\n".join(parts))


def write(check):
    return update(PAGE, "claims", block(), check=check)


if __name__ == "__main__":
    run(__doc__, write)
