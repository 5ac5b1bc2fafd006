"""Plain text of docstrings and of headers' comments, made into reStructuredText that shows the same characters."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LITERAL = re.compile(r"(``.+?``)")
PAGE = re.compile(r"\bdocs/([a-z_/]+)\.md\b(?:, (\"[^\"]+\"))?")


def escaped(line: str) -> str:
    """Words between backticks are literals, names of pages are links, and nothing else is markup."""
    parts = LITERAL.split(re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line))
    for i in range(0, len(parts), 2):
        text = re.sub(r"([*|\\])", r"\\\1", parts[i])
        text = re.sub(r"(?<=\w)_(?!\w)", r"\\_", text)
        parts[i] = PAGE.sub(lambda found: f":doc:`/docs/{found[1]}`" if _is_page(found[1]) else found[0], text)
    return "".join(parts)


def _is_page(name: str) -> bool:
    return (ROOT / "docs" / f"{name}.md").is_file()


def paragraphs(lines: list[str]) -> list[str]:
    """A comment's text: what is indented stays as it stands, all else flows."""
    out: list[str] = []
    literal = False
    for line in lines:
        if line.startswith("  "):
            out += [] if literal else ["", "::", ""]
            out.append("  " + line)
        else:
            out += [""] if literal and line else []
            out.append(escaped(line))
        literal = line.startswith("  ")
    return out
