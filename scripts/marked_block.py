"""A block of a Markdown file that a script writes: the lines between `<!-- begin NAME -->` and `<!-- end NAME -->`."""

import re
from pathlib import Path


def replaced(text: str, name: str, block: str) -> str:
    """`text` with the contents of the block `name` replaced."""
    marks = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if len(marks.findall(text)) != 1:
        raise ValueError(f"the file must have one block marked '{name}'")
    lines = block.rstrip("\n") + "\n" if block else ""
    return marks.sub(lambda m: m[1] + lines + m[2], text)


def update(path: Path, name: str, block: str, *, check: bool) -> bool:
    """Writes the block, or with `check` only says whether it is current."""
    old = path.read_text(encoding="utf-8")
    new = replaced(old, name, block)
    if not check and new != old:
        path.write_text(new, encoding="utf-8")
    return not check or new == old


def table(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
