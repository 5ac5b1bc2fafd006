"""The types of the public functions, as a type checker sees them, and the table of options that they are made from."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import heddle
import pytest
from heddle._types import AttentionOptions

_CASES = Path(__file__).with_name("typing_cases.py")
_ROOT = Path(__file__).parents[2]


def test_options_are_those_of_attention():
    names = list(inspect.signature(heddle.attention).parameters)
    assert sorted(AttentionOptions.__annotations__) == sorted(set(names) - {"q", "k", "v", "return_lse"})


def test_a_type_checker_sees_mistakes():
    pytest.importorskip("mypy", reason="mypy is not installed")
    if not (_ROOT / "pyproject.toml").is_file():
        pytest.skip("the package's sources are not beside the tests")
    done = subprocess.run([sys.executable, "-m", "mypy", str(_CASES)], cwd=_ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    found = {int(line): text for line, text in re.findall(r"typing_cases\.py:(\d+): error: (.*)", done.stdout)}
    wanted = {
        number: line.partition("# error: ")[2]
        for number, line in enumerate(_CASES.read_text().splitlines(), 1)
        if "  # error: " in line
    }
    assert len(wanted) == 12
    assert found.keys() == wanted.keys(), done.stdout
    for number, text in wanted.items():
        assert text in found[number]
