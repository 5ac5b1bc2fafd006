"""What scripts/test_gpu.sh makes of racecheck's reports, without a GPU."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECODE = (
    "void heddle::Kernel<{(int)4, (int)1, (bool)1, (bool)0}, (bool)0>>(heddle::cuda::sm90::attention_decode::Params)"
)
OTHER = "void heddle::Kernel<(int)64>(heddle::cuda::sm90::attention_fwd::Params)"
pytestmark = pytest.mark.skipif(shutil.which("awk") is None, reason="no awk")


def race(kernel, first, *seconds, severity="Error"):
    """A finding as racecheck writes it: one access, and those that meet it."""
    others = [
        f"=========     and {kind} access at {kernel}+0x{n:x}0 [{n + 1} hazards]" for n, kind in enumerate(seconds)
    ]
    return [f"========= {severity}: Race reported between {first} access at {kernel}+0xf0", *others, "========="]


def judged(tmp_path, *findings, known=ROOT / "tests/gpu/racecheck_known.txt"):
    """(exit status, what is new, what was excused) of a report."""
    report = tmp_path / "report.log"
    lines = ["========= COMPUTE-SANITIZER", *(line for finding in findings for line in finding)]
    report.write_text("\n".join([*lines, "========= RACECHECK SUMMARY: n hazards displayed"]) + "\n")
    script = ROOT / "tests/gpu/racecheck_new.awk"
    done = subprocess.run(["awk", "-v", f"known={known}", "-f", script, report], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize("severity", ["Error", "Warning"])
def test_reads_and_writes_of_the_known_kernels_are_excused_and_counted(tmp_path, severity):
    findings = [
        race(DECODE, "Write", "Read", "Read", severity=severity),
        race(DECODE, "Read", "Write", severity=severity),
    ]
    status, new, excused = judged(tmp_path, *findings)
    assert (status, new) == (0, []) and sorted(line.split(" are known")[0] for line in excused) == [
        "racecheck: 1 pairs of kind read-write",
        "racecheck: 2 pairs of kind write-read",
    ]


def test_nothing_is_found_in_a_report_without_findings(tmp_path):
    assert judged(tmp_path) == (0, [], [])


def test_a_write_against_a_write_of_the_known_kernels_is_new(tmp_path):
    status, new, excused = judged(tmp_path, race(DECODE, "Write", "Read", "Write", "Read"))
    assert status == 1 and len(new) == 1 and new[0].startswith("write-write: ") and len(excused) == 1
    assert "and Write access at" in new[0] and "[2 hazards]" in new[0]


def test_what_is_no_pair_of_accesses_is_new_in_the_known_kernels(tmp_path):
    status, new, _ = judged(tmp_path, race(DECODE, "Read"), [f"========= Error: Potential hazard in {DECODE}"])
    assert status == 1 and [line.split(":")[0] for line in new] == ["alone", "other"]


def test_other_kernels_are_excused_by_nothing(tmp_path):
    for first, second in (("Write", "Read"), ("Read", "Write"), ("Write", "Write")):
        status, new, excused = judged(tmp_path, race(DECODE, "Write", "Read"), race(OTHER, first, second))
        assert status == 1 and len(new) == 1 and OTHER in new[0] and len(excused) == 1
    nothing = tmp_path / "known.txt"
    nothing.write_text("")  # as where racecheck does not take the planted kernel for a race
    assert judged(tmp_path, race(DECODE, "Write", "Read"), known=nothing)[0] == 1


def test_a_line_without_kinds_excuses_all_of_its_kernels(tmp_path):
    kernel = "nvjet_sm90_tst_64x8"
    findings = [race(kernel, "Write", "Write"), [f"========= Warning: something else in {kernel}"]]
    assert judged(tmp_path, *findings)[:2] == (0, [])
