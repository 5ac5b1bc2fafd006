"""heddle doctor: what it says of a build, a machine and its settings, and its exit code."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from command import CLI, needs_command, run, run_json

pytestmark = needs_command

CALLS = ["prefill", "decoding", "gradients", "nvfp4 layer"]


def doctor(code=0, **settings):
    """Of an environment that has these HEDDLE_* variables alone: findings by subject, calls by subject."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HEDDLE")}
    texts = {}
    for flags in ([], ["--json"]):
        done = subprocess.run(
            [CLI, "doctor", *flags], capture_output=True, text=True, env={**plain, **settings}, timeout=300
        )
        assert done.returncode == code and not done.stderr, done.stdout + done.stderr
        texts[bool(flags)] = done.stdout
    said = json.loads(texts[True])
    everything = said["findings"] + said["calls"]
    for finding in everything:
        assert finding["verdict"] in ("ok", "note", "problem")
        assert ("advice" in finding) == (finding["verdict"] != "ok"), finding
        assert finding["found"] in texts[False] and finding.get("advice", "") in texts[False]
    verdicts = [finding["verdict"] for finding in everything]
    assert said["verdict"] == next((v for v in ("problem", "note") if v in verdicts), "ok")
    assert (said["verdict"] == "problem") == (code == 1)
    tail = texts[False].splitlines()[-1]
    for word in ("problem", "note"):
        count = verdicts.count(word)
        assert f"{count or 'no'} {word}{'' if count == 1 else 's'}" in tail
    findings = {finding["subject"]: finding for finding in said["findings"]}
    assert len(findings) == len(said["findings"])
    return findings, {finding["subject"]: finding for finding in said["calls"]}


def healthy():
    """Whether this machine itself has no problem, of a driver say."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HEDDLE")}
    return subprocess.run([CLI, "doctor"], capture_output=True, env=plain).returncode == 0


needs_health = pytest.mark.skipif(not CLI or not healthy(), reason="heddle doctor has found a problem of this machine")


@needs_health
def test_a_machine_without_settings():
    found, calls = doctor()
    info = run_json("info")
    assert info["version"] in found["build"]["found"] and info["build"]["compiler"] in found["build"]["found"]
    kernels = info["gpu"]["kernels"]
    assert ("GPU kernels of CUDA" if kernels else "no GPU kernels") in found["build"]["found"]
    assert found["processor"]["found"].startswith(info["machine"]["processor"])
    assert f"target {info['runnable_targets'][0]}" in found["processor"]["found"]
    assert f"on {info['machine']['processors']} processors" in found["threads"]["found"]
    assert {"build", "oneDNN", "processor", "threads"} <= set(found)
    layers = info["float_layers"]
    assert layers["runs"] == (found["oneDNN"]["verdict"] == "ok")
    assert layers["library" if layers["runs"] else "reason"] in found["oneDNN"]["found"]
    for number, gpu in enumerate(info["gpu"]["gpus"]):
        assert gpu["name"] in found[f"GPU {number}"]["found"]
    assert ("GPUs" in found) == (not info["gpu"]["gpus"])
    assert [f"{name}, CPU" for name in CALLS] == [name for name in calls if name.endswith("CPU")]


@needs_health
@pytest.mark.parametrize("name", CALLS)
def test_calls_get_what_explain_says(name):
    _, calls = doctor()
    for call in calls.values():
        if call["call"] != name:
            continue
        words = call["ask"].split()
        assert words[:2] == ["heddle", "explain"]
        chosen = next(c for c in run_json(*words[1:])["candidates"] if c["chosen"])
        assert call["candidate"] == chosen["name"] and call["plan"] == chosen["plan"]
        assert call["estimated_seconds"] == pytest.approx(chosen["estimated_seconds"])


@needs_health
def test_a_target_that_is_not_the_best():
    best, *others = run_json("info")["runnable_targets"]
    assert doctor(HEDDLE_CPU_TARGET=best)[0]["processor"]["verdict"] == "ok"
    for target in others[:1]:
        processor = doctor(HEDDLE_CPU_TARGET=target)[0]["processor"]
        assert processor["verdict"] == "note" and f"HEDDLE_CPU_TARGET is '{target}'" in processor["found"]
        assert processor["advice"] == f"take HEDDLE_CPU_TARGET away for {best}, the best of them here."


def test_a_target_that_there_is_not():
    found, calls = doctor(code=1, HEDDLE_CPU_TARGET="avx9")
    assert found["processor"]["verdict"] == "problem"
    assert "CPU target 'avx9' is not built into this library" in found["processor"]["found"]
    assert run_json("info")["runnable_targets"][0] in found["processor"]["advice"]
    assert all(calls[f"{name}, CPU"]["verdict"] == "problem" for name in CALLS)


@needs_health
def test_threads():
    processors = run_json("info")["machine"]["processors"]
    threads = doctor(HEDDLE_NUM_THREADS=str(processors + 1))[0]["threads"]
    assert threads["verdict"] == "note" and "wait for each other: HEDDLE_NUM_THREADS=" in threads["advice"]
    assert f"HEDDLE_NUM_THREADS is '{processors + 1}'" in threads["found"]
    one = doctor(HEDDLE_NUM_THREADS="1")[0]["threads"]
    limited = "control group" in one["found"]
    assert limited or (one["verdict"] == "note") == (processors > 1)


def test_threads_that_are_no_number():
    found, _ = doctor(code=1, HEDDLE_NUM_THREADS="many")
    assert found["threads"]["found"] == "HEDDLE_NUM_THREADS is 'many': it must be a number of threads from 1 to 4096"


@needs_health
def test_a_kernel_that_is_asked_for():
    on_gpus_too = bool(run_json("info")["gpu"]["gpus"])  # where there is no such kernel
    found, calls = doctor(code=1 if on_gpus_too else 0, HEDDLE_KERNEL="reference")
    assert found["HEDDLE_KERNEL"]["verdict"] == "note" and found["HEDDLE_KERNEL"]["found"].startswith("'reference': ")
    call = calls["prefill, CPU"]
    assert call["verdict"] == "note" and call["candidate"] == "reference"
    assert call["better"] == {"name": "cpu", "reason": "another candidate was asked for by name"}
    assert call["advice"] == "take HEDDLE_KERNEL away."


def test_a_kernel_that_serves_no_call_on_the_cpu():
    _, calls = doctor(code=1, HEDDLE_KERNEL="sm80")
    call = calls["gradients, CPU"]
    assert call["found"] == "no candidate runs; cpu: another candidate was asked for by name"
    assert call["verdict"] == "problem" and "candidate" not in call
    assert calls["nvfp4 layer, CPU"]["candidate"] == "cpu"  # no linear layer has a candidate of this name


def test_a_kernel_that_there_is_not():
    found, calls = doctor(code=1, HEDDLE_KERNEL="sm90_decod")
    assert found["HEDDLE_KERNEL"]["found"] == "'sm90_decod', which no operation has; did you mean sm90_decode?"
    assert {call["found"] for call in calls.values()} == {"refused: HEDDLE_KERNEL names no kernel"}


@needs_health
def test_validation():
    assert doctor(HEDDLE_VALIDATE="0")[0]["HEDDLE_VALIDATE"]["verdict"] == "ok"
    assert doctor(HEDDLE_VALIDATE="1")[0]["HEDDLE_VALIDATE"]["verdict"] == "note"


def test_validation_that_is_neither():
    found, _ = doctor(code=1, HEDDLE_VALIDATE="2")
    assert found["HEDDLE_VALIDATE"]["found"] == "HEDDLE_VALIDATE is '2': it must be 0 or 1"


@needs_health
def test_exchange_of_ranks():
    assert doctor(HEDDLE_RANKS_EXCHANGE="nccl")[0]["HEDDLE_RANKS_EXCHANGE"]["verdict"] == "note"


def test_an_exchange_of_ranks_that_there_is_not():
    found, _ = doctor(code=1, HEDDLE_RANKS_EXCHANGE="mpi")
    assert found["HEDDLE_RANKS_EXCHANGE"]["found"] == "'mpi': it must be nccl, and means nothing as it is"


@needs_health
def test_variables_that_nobody_reads():
    found, _ = doctor(HEDDLE_WEAVE="1")
    assert found["HEDDLE_WEAVE"]["verdict"] == "note"
    assert found["HEDDLE_WEAVE"]["found"] == "nothing in the library reads it"


def read_by_the_library():
    sources = pathlib.Path(__file__).parents[2] / "src"
    if not sources.is_dir():
        pytest.skip("the sources are not here")
    files = [file for file in sources.rglob("*") if file.suffix in (".cc", ".h", ".cu", ".cuh")]
    return sorted({name for file in files for name in re.findall(r'getenv\("(HEDDLE_\w+)"\)', file.read_text())})


def test_misspelt_variables():
    """Of every one that there is."""
    meant = read_by_the_library()
    assert "HEDDLE_KERNEL" in meant
    typed = {name[:-2] + name[-1] + name[-2]: name for name in meant}
    found, _ = doctor(code=1, **dict.fromkeys(typed, "1"))
    for wrong, right in typed.items():
        assert found[wrong]["verdict"] == "problem"
        assert found[wrong]["found"] == f"nothing reads it; did you mean {right}?"


def test_a_tuning_file_that_is_none(tmp_path):
    file = str(tmp_path / "tuning.json")
    if not run_json("info")["gpu"]["kernels"]:
        if healthy():
            tuning = doctor(HEDDLE_TUNING=file)[0]["tuning"]
            assert tuning["verdict"] == "note"
            assert tuning["found"] == f"{file}: not read, as this build has no GPU kernels"
        return
    tuning = doctor(code=1, HEDDLE_TUNING=file)[0]["tuning"]
    assert tuning["verdict"] == "problem" and f"HEDDLE_TUNING is {file}: there is no such file" in tuning["found"]


@needs_health
def test_a_driver_without_kernels_to_run(tmp_path):
    """A library of the driver's name, where the loader looks for it."""
    info = run_json("info")["gpu"]
    if info["gpus"]:
        pytest.skip("there is a GPU")
    maps = pathlib.Path("/proc/self/maps").read_text().split()
    some = next(path for path in maps if "/libm.so" in path or "/libm-" in path)
    shutil.copy(some, tmp_path / "libcuda.so.1")
    gpus = doctor(LD_LIBRARY_PATH=str(tmp_path))[0]["GPUs"]
    assert gpus["verdict"] == "note" and "(libcuda.so.1), and no kernel runs on it: " in gpus["found"]
    assert ("HEDDLE_CUDA=ON" in gpus["advice"]) == (not info["kernels"])


@needs_health
def test_onednn_that_cannot_be_loaded(tmp_path):
    if not run_json("info")["float_layers"]["runs"]:
        pytest.skip("this heddle has no oneDNN to hide")
    for soname in ("libdnnl.so.2", "libdnnl.so.3"):
        (tmp_path / soname).write_bytes(b"")
    found, calls = doctor(LD_LIBRARY_PATH=str(tmp_path))
    assert found["oneDNN"]["verdict"] == "note" and "cannot be loaded: " in found["oneDNN"]["found"]
    assert all(call["verdict"] == "ok" for call in calls.values() if call["subject"].endswith("CPU"))


def test_its_flags():
    assert "unknown flag '--jsno'; did you mean --json?" in run("doctor", "--jsno", code=2)
