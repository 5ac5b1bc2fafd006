"""Holds the includes of the C++ and CUDA sources, and the imports of the Python package, to the arrows of
docs/architecture.md.

Between the marks `layers` that page has a line a room: its folder, an arrow, and the rooms whose headers its files may
include, or whose modules they may import. Their own and include/heddle/ are open to all. A line for `folder/*` is about
each folder in it that has no line of its own: a room to itself, so that none of them sees another; an arrow to it leads to
all of them. An arrow that nothing needs is an error, too.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/architecture.md"
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
SOURCES = ("*.h", "*.cc", "*.cu", "*.cuh", "python/heddle/*.py")


def arrows(page: str) -> dict[str, set[str]]:
    """room -> the rooms that it may include, as the page draws them."""
    block = re.search(r"<!-- begin layers -->\n```\n(.*?)```\n<!-- end layers -->", page, re.DOTALL)
    if not block:
        sys.exit(f"check_layers.py: {PAGE} has no block marked 'layers'")
    found = {}
    for line in filter(None, block[1].splitlines()):
        room, arrow, others = line.partition("→")
        if not arrow:
            sys.exit(f"check_layers.py: {PAGE}: no arrow in the line '{line}'")
        found[room.strip()] = {other.strip() for other in others.split(",") if other.strip()}
    if unknown := {other for others in found.values() for other in others} - set(found):
        sys.exit(f"check_layers.py: {PAGE}: arrows lead to rooms that have no line: {', '.join(sorted(unknown))}")
    return found


def room_of(path: str, rooms: dict[str, set[str]]) -> str | None:
    """The longest folder of a path that is a room."""
    folders = [folder.as_posix() for folder in Path(path).parents]  # the longest first
    return next((folder for folder in folders if line_of(folder, rooms)), None)


def line_of(folder: str, rooms: dict[str, set[str]]) -> str | None:
    """What the page's line about a room begins with: its folder, or the one around it and a star."""
    around = f"{Path(folder).parent.as_posix()}/*"
    return folder if folder in rooms else around if around in rooms else None


def target(name: str, file: Path) -> str | None:
    """The path from the root of what a file includes; None if it is none of the tree's."""
    for folder in (file.parent, ROOT / "src", ROOT / "include", ROOT / "tests", ROOT / "cli", ROOT / "python/src"):
        if (folder / name).is_file():
            return (folder / name).resolve().relative_to(ROOT).as_posix()
    return None


def run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A tree's nodes without those that type checkers alone see."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for after in child.orelse:
                yield from run_nodes(after)
        else:
            yield from run_nodes(child)


def imports(file: Path) -> list[tuple[str, str | None]]:
    """What a file of the package imports of the package when it runs: how it says so, and the path from the root; None: there is
    no such module."""
    found: list[tuple[str, str | None]] = []
    for node in run_nodes(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        folder = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for alias in node.names:
            # A module of its own, or a name of the module or package in front of it.
            places = ((folder / alias.name).with_suffix(".py"), folder / alias.name / "__init__.py")
            places += (folder.with_suffix(".py"), folder / "__init__.py")
            to = next((place.relative_to(ROOT).as_posix() for place in places if place.is_file()), None)
            words = f"from {'.' * node.level}{node.module or ''} import {alias.name}"
            if alias.name != "_heddle" and not (node.module or "").endswith("_heddle"):  # the native module
                found.append((words, to))
    return found


def includes(file: Path) -> list[tuple[str, str | None]]:
    return [(name, target(name, file)) for name in INCLUDE.findall(file.read_text(encoding="utf-8"))]


def main() -> None:
    rooms = arrows((ROOT / PAGE).read_text(encoding="utf-8"))
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wrong, used = [], set()
    for path in listed.split():
        room = room_of(path, rooms)
        if room is None:
            if path.startswith("src/"):
                wrong.append(f"{path}: its folder has no line")
            continue
        file = ROOT / path
        for name, to in imports(file) if file.suffix == ".py" else includes(file):
            if to is None:
                wrong.append(f"{path}: there is no {name}")
                continue
            other = room_of(to, rooms)
            if other == room or to.startswith("include/"):
                continue
            line = line_of(room, rooms)
            arrow = next((end for end in (other, other and line_of(other, rooms)) if end in rooms[line]), None)
            used.add((line, arrow))
            if arrow is None:
                wrong.append(f"{path}: {name}: no arrow leads from {line} to {other or to}")
    for room, others in rooms.items():
        wrong += [
            f"{PAGE}: nothing needs the arrow from {room} to {other}"
            for other in sorted(others)
            if (room, other) not in used
        ]
    if wrong:
        sys.exit("\n".join(wrong) + f"\ncheck_layers.py: {len(wrong)} against the arrows of {PAGE}")
    print(f"{len(used)} arrows between {len(rooms)} rooms")


if __name__ == "__main__":
    main()
