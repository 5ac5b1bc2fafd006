"""oneDNN is needed by float layers on the CPU alone, and only from the first on."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import heddle
import pytest

SCRIPT = pathlib.Path(__file__).with_name("float_layers.py")


def run(**settings):
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=120, env={**os.environ, **settings}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_float_layers_run():
    assert run() == "runs"


def test_without_onednn_float_layers_are_refused_and_nothing_else(tmp_path):
    for soname in ("libdnnl.so.2", "libdnnl.so.3"):
        (tmp_path / soname).write_bytes(b"")  # where the loader looks first
    found = run(LD_LIBRARY_PATH=str(tmp_path))
    assert re.fullmatch(
        r"\[linear\] float32 and bfloat16 layers on the CPU need oneDNN, which cannot be loaded: "
        rf"{re.escape(str(tmp_path))}/libdnnl\.so\.\d: file too short\. Install what is missing: on Debian 12, oneDNN is "
        r"the package libdnnl2; attention, layers in 8 and 4 bits and GPUs do without",
        found,
    )


@pytest.mark.skipif(not shutil.which("readelf"), reason="there is no readelf")
def test_only_its_own_module_needs_it():
    folder = pathlib.Path(heddle.__file__).parent
    needed = {}
    for file in folder.glob("*.so*"):
        text = subprocess.run(["readelf", "-d", file], capture_output=True, text=True, check=True).stdout
        needed[file.name] = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    assert any(name.startswith("_heddle") for name in needed)
    for name, libraries in needed.items():
        others = [one for one in libraries if re.match(r"lib(dnnl|OpenCL|gomp)\b", one)]
        assert not others or name == "libheddle_onednn.so", (name, libraries)
