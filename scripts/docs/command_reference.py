"""The command's reference: what `heddle VERB --help` prints, of every verb."""

import re
import subprocess
from pathlib import Path


def _help(command: str, verbs: list[str]) -> str:
    return subprocess.run([command, *verbs, "--help"], check=True, capture_output=True, text=True).stdout


def _verbs(text: str) -> list[str]:
    _, _, listed = text.partition("\nSubcommands:\n")
    return re.findall(r"^  ([a-z][\w-]*) ", listed, re.MULTILINE)


def write(command: str, path: Path) -> None:
    text = _help(command, [])
    out = ["# Command line", "", "What `heddle --help` and its kin say.", "", "```text", text.rstrip(), "```", ""]
    if not _verbs(text):
        raise ValueError(f"{command} --help lists no verbs")
    for verb in _verbs(text):
        text = _help(command, [verb])
        out += [f"## heddle {verb}", "", "```text", text.rstrip(), "```", ""]
        for under in _verbs(text):
            out += [f"### heddle {verb} {under}", "", "```text", _help(command, [verb, under]).rstrip(), "```", ""]
    path.write_text("\n".join(out), encoding="utf-8")
