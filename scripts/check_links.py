"""Checks the links of the repository's Markdown files: each relative link names a file that is there, each #anchor a heading of it.
A file of bench/results that is named without a link must be there, too."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]\n]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
RESULTS = re.compile(r"`(bench/results/[^`*]+\.json)`")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def text_of(path: Path) -> str:
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Anchors of a file's headings, as GitHub and GitLab make them."""
    found: set[str] = set()
    for heading in HEADING.findall(text_of(path)):
        words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while (name := slug if number == 0 else f"{slug}-{number}") in found:
            number += 1
        found.add(name)
    return found


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in LINK.findall(text_of(path)):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.is_relative_to(ROOT) or not target.exists():
            broken.append(f"{path.relative_to(ROOT)}: {link}: there is no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{path.relative_to(ROOT)}: {link}: {target.name} has no such heading")
    for name in RESULTS.findall(text_of(path)):
        if not (ROOT / name).exists():
            broken.append(f"{path.relative_to(ROOT)}: {name}: there is no such file")
    return broken


def main() -> int:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    broken = [line for name in names for line in broken_links(ROOT / name)]
    print("\n".join(broken) if broken else f"links of {len(names)} files are good")
    return 1 if broken or not names else 0


if __name__ == "__main__":
    sys.exit(main())
