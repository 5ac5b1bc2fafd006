"""What docs/adaptive.md says of models, from bench/results/adaptive-models-*.json of bench/adaptive_models.py.

scripts/measured_table.py writes it; each file has a section.
"""

from bench_results import marked, said, span
from marked_block import table

NOTHING = "–"


def percent(share):
    """ "0 %" is none at all."""
    return "0 %" if share == 0 else f"{100 * share:.1f} %" if share >= 5e-4 else "< 0.1 %"


def model_words(name, about):
    """Of a model's line above the tables."""
    shape = f"{said(about['layers'], 'layer')} of {said(about['heads'], 'head')} of {about['head_size']}"
    rows = f"{said(about['sequences'], 'sequence')} of {about['rows']} tokens"
    masked = "" if about["causal"] == "none" else ", causal"
    trained = (
        f"; {about['steps']} steps of {about['batch'] * about['rows']} bytes, validation loss {about['validation_loss']:.2f} nats a byte"
        if "steps" in about
        else ""
    )
    even = span(about["median_keys_by_layer"], "{:.0f}")
    return f"- `{name}`: {shape}, {rows}{masked}{trained}. The median row spreads its mass as evenly as over {even} keys, by layer; scores reach {about['largest_score']:.0f}."


def replaced(rows):
    out = [
        ["", "tol", "replaced", "by layer", "largest bound", "largest error", "bound / error", "rows above their bound"]
    ]
    for row in rows:
        ratio = row["bound_over_error"]
        out.append([
            marked(f"`{row['model']}`", [row]), f"{row['tol']:g}", percent(row["replaced"]),
            f"{percent(min(row['replaced_by_layer']))} to {percent(max(row['replaced_by_layer']))}",
            f"{row['bound']['1.0']:.2g}", f"{row['error']['1.0']:.2g}",
            NOTHING if ratio is None else f"{ratio['0.5']:.2g} ({ratio['0.0']:.2g} to {ratio['0.9']:.2g})",
            f"{row['exceeded']} of {row['rows']}",
        ])  # fmt: skip
    return table(out)


def skipped(rows):
    tols = list(rows[0]["rows"])
    out = [["", "bound of scores", "keys a block", *(f"tol {tol}" for tol in tols)]]
    for row in rows:
        cells = [f"{percent(row['rows'][tol])} / {percent(row['runs'][tol])}" for tol in tols]
        out.append([f"`{row['model']}`", row["bound"], str(row["keys"]), *cells])
    return table(out)


def section(name, content):
    c = content["conditions"]
    about = (
        f"**{c['cpu']}**, Heddle's target `{c['heddle_target']}`: {said(c['threads'], 'thread')}, torch {c['torch']}, commit "
        f"{c['commit'][:7]}, {c['date'][:10]}, [`{name}`](../bench/results/{name})."
    )
    models = "\n".join(model_words(model, about) for model, about in content["models"].items())
    return "\n\n".join([about, models, replaced(content["rows"])])


def written(files):
    """The block of what was replaced, from [(file name, content)]."""
    return "\n\n".join(section(name, content) for name, content in files)


def written_skips(files):
    """The block of what could be skipped."""
    return "\n\n".join(
        f"[`{name}`](../bench/results/{name}):\n\n{skipped(content['skipped'])}" for name, content in files
    )
