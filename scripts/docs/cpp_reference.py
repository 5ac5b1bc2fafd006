"""The C++ reference: a page for each public header, with every declaration and the comment above it, as Sphinx's C++ domain takes
them. Reads the headers as clang-format leaves them: a comment stands above what it is about, a blank line ends it. What it cannot
read is an error, so that nothing goes missing."""

import re
from pathlib import Path

from text import paragraphs

GROUPS = {
    "Attention": [
        "attention",
        "kv_cache",
        "int4_cache",
        "sparse",
        "patterns",
        "adaptive",
        "nsa",
        "partial",
        "distributed",
        "distributed_block",
        "distributed_mpi",
        "distributed_nccl",
        "distributed_mpi_nccl",
    ],
    "Low-bit weights and models": [
        "lowbit",
        "linear",
        "checkpoint",
        "safetensors",
        "transformer",
        "transformer_block",
        "asam",
    ],
    "What would run": ["explain", "candidate"],
    "What all of them use": ["tensor", "runtime", "error"],
}
NAMESPACE = re.compile(r"namespace ([\w:]+) \{$")
#: Members that say how a class is copied, moved and destroyed, and what it hides.
SPECIAL = re.compile(r"(virtual )?~|using |friend |.*= (default|delete)$|(\w+(& operator=)?\(?)+\(\w+&&\) noexcept$")


class Declaration:
    """One entry: a comment's lines, and the declarations under it."""

    def __init__(self, comment: list[str]):
        self.comment = comment
        self.sources: list[list[str]] = []


def _comment(line: str) -> str:
    return line.lstrip()[2:].removeprefix(" ").rstrip()


def _ends(source: list[str]) -> bool:
    """Whether these lines are a whole declaration."""
    text = "\n".join(re.sub(r"//.*|\"[^\"]*\"", "", line) for line in source)
    if any(text.count(a) != text.count(b) for a, b in ("()", "{}")):
        return False
    return text.rstrip().endswith((";", "}"))


def entries(lines: list[str]) -> list[Declaration]:
    """What a scope declares, one comment after the other."""
    found: list[Declaration] = []
    comment: list[str] = []
    source: list[str] = []
    fresh = True  # the next declaration begins an entry, because a blank line or a comment stands before it
    for line in lines:
        if source:
            source.append(line)
        elif not line.strip():
            fresh = True
            continue
        elif line.lstrip().startswith("//"):
            comment.append(_comment(line))
            fresh = True
            continue
        else:
            source = [line]
        if _ends(source):
            if fresh:
                found.append(Declaration(comment))
                comment = []
            found[-1].sources.append(source)
            source, fresh = [], False
    if source or comment:
        raise ValueError(f"this declares nothing: {source or comment}")
    return found


def _dedented(source: list[str]) -> list[str]:
    depth = len(source[0]) - len(source[0].lstrip())
    return [line[depth:] for line in source]


def _signature(source: list[str]) -> str:
    """A function or a constant in one line, without its body."""
    text = " ".join(re.sub(r" *//.*", "", line).strip() for line in source)
    text = re.sub(r"\{ return .*\}$|\{\}$|(?<=\)) (const )?\{.*\}$", lambda m: m[1] or "", text)
    return text.strip().rstrip(";").strip()


def _indent(lines: list[str]) -> list[str]:
    return ["   " + line if line else "" for line in lines]


def rendered(entry: Declaration) -> list[str]:
    first = entry.sources[0][0].strip()
    text = paragraphs(entry.comment)
    if found := re.match(r"(struct|class|enum class) (\w+)(.*)", first):
        if len(entry.sources) > 1:  # the others have no comment of their own
            others = Declaration([])
            others.sources = entry.sources[1:]
            entry.sources = entry.sources[:1]
            return rendered(entry) + rendered(others)
        kind, name, rest = found[1], found[2], found[3]
        if rest == ";":  # declared, and defined elsewhere
            return []
        source = _dedented(entry.sources[0])
        base = re.match(r" : [\w:, ]+", rest)
        if kind != "class":
            body = ["", ".. code-block:: cpp", "", *_indent(source)]
        else:
            inner = source[1:-1]
            private = next((i for i, line in enumerate(inner) if line.strip() == "private:"), len(inner))
            body = [""]
            for one in entries([line for line in inner[:private] if line.strip() != "public:"]):
                one.sources = [s for s in one.sources if not SPECIAL.match(_signature(s))]
                body += rendered(one) if one.sources else []
        head = f".. cpp:{kind.replace(' ', '-')}:: {name}{base[0].rstrip() if base else ''}"
        return [head, "", *_indent(text + body), ""]
    signatures = [_signature(source) for source in entry.sources]
    if all(signature.startswith("using ") for signature in signatures):  # a name for a type
        kind, signatures = "type", [signature.removeprefix("using ") for signature in signatures]
    else:
        kind = "function" if "(" in signatures[0].split("=")[0] or "operator" in signatures[0] else "var"
    head = f".. cpp:{kind}:: "
    return [head + f"\n{' ' * len(head)}".join(signatures), "", *_indent(text), ""]


def page(header: Path) -> str:
    head, _, rest = header.read_text(encoding="utf-8").partition("#pragma once\n")
    title = f"heddle/{header.name}"
    out = [title, "=" * len(title), "", *paragraphs([_comment(line) for line in head.splitlines()]), ""]
    scope: list[str] = []
    spaces: list[str] = []

    def flush() -> None:
        for one in entries(scope):
            out.extend(rendered(one))
        scope.clear()

    for line in rest.splitlines():
        if line.startswith("#include"):
            continue
        if opened := NAMESPACE.match(line):
            flush()
            spaces.append(opened[1])
            out += [f".. cpp:namespace:: {'::'.join(spaces)}", ""]
        elif line.startswith("}  // namespace"):
            flush()
            spaces.pop()
        else:
            scope.append(line)
    return "\n".join(out) + "\n"


def write(headers: Path, folder: Path) -> None:
    """Pages of all headers, and their list."""
    folder.mkdir(parents=True)
    listed = [name for names in GROUPS.values() for name in names]
    there = {header.stem for header in headers.glob("*.h")} - {"heddle"}
    if there != set(listed):
        raise ValueError(f"scripts/docs/cpp_reference.py has no group for {there ^ set(listed)}")
    index = ["C++", "===", "", "``#include <heddle/heddle.h>`` is all of them; each stands alone, too.", ""]
    for group, names in GROUPS.items():
        index += [".. toctree::", f"   :caption: {group}", "   :maxdepth: 1", "", *(f"   {name}" for name in names), ""]
        for name in names:
            (folder / f"{name}.rst").write_text(page(headers / f"{name}.h"), encoding="utf-8")
    (folder / "index.rst").write_text("\n".join(index), encoding="utf-8")
