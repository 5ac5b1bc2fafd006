"""heddle completion: scripts that each shell reads, and what it completes by them."""

import shutil
import subprocess

import pytest
from command import needs_command, run

pytestmark = needs_command
SHELLS = ["bash", "zsh", "fish"]

ASK = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_heddle
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="session")
def script(tmp_path_factory):
    file = tmp_path_factory.mktemp("completion") / "heddle.bash"
    file.write_text(run("completion", "bash"))
    return file


@pytest.fixture
def complete(script, tmp_path):
    """What bash makes of a command line whose last word is to be completed, in a folder with a few files."""
    for name in ("queries.npy", "a file.npy"):
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()

    def ask(*words):
        done = subprocess.run(
            ["bash", "--norc", "-c", ASK, "bash", script, "heddle", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return [line for line in done.stdout.split("\n") if line]

    return ask


@pytest.mark.parametrize(
    "words, found",
    [
        (["expl"], ["explain"]),
        (["q"], ["quantize"]),
        (["explain", "lin"], ["linear"]),
        (["explain", "append"], ["append", "append-int4"]),
        (["bench", "l"], ["linear"]),
        (["info", "l"], []),
        (["completion", ""], SHELLS),
        (["explain", "--batch", "2", "--causal", "top_left", "s"], ["sparse", "select", "step"]),
        (["explain", "--window", "-1", "-1", "u"], ["unpack"]),
    ],
)
def test_verbs(complete, words, found):
    assert complete(*words) == found


@pytest.mark.parametrize(
    "words, found",
    [
        (["--v"], ["--version"]),
        (["quantize", "--form"], ["--format"]),
        (["explain", "linear", "--act"], ["--activation"]),
        (["explain", "--act"], []),
        (["run", "--cu"], ["--cu-seqlens-q", "--cu-seqlens-k"]),
        (["bench", "--dtype", "f32", "--dev"], ["--device"]),
    ],
)
def test_flags(complete, words, found):
    assert complete(*words) == found


@pytest.mark.parametrize(
    "words, found",
    [
        (["explain", "--dtype", ""], ["f32", "f16", "bf16"]),
        (["explain", "-t", "b"], ["bf16"]),
        (["explain", "--dtype", "=", "b"], ["bf16"]),  # as bash splits --dtype=b
        (["explain", "--dtype", "="], ["f32", "f16", "bf16"]),
        (["bench", "--dtype", "f32", "f1"], ["f16"]),
        (["explain", "--batch", ""], []),
        (["explain", "linear", "--activation", "ge"], ["gelu_erf", "gelu_tanh"]),
        (["quantize", "--format", "mx"], ["mxfp4"]),
        (["quantize", "--rule", "f"], ["four_six", "floor"]),
        (["explain", "--force", "sm90_d"], ["sm90_decode"]),
        (["run", "--q", "q"], ["queries.npy"]),
        (["run", "--q", "a"], ["a file.npy"]),
        (["quantize", "m"], ["models"]),
        (["quantize", "-o", ""], ["models"]),
    ],
)
def test_values(complete, words, found):
    assert complete(*words) == found


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_flag_of_help(shell):
    text = run("completion", shell)
    for verb in (["explain", "linear"], ["quantize"], ["run"]):
        named = [word for line in run(*verb, "--help").splitlines() for word in line.split()[:1] if "--" in word]
        for flag in {part for word in named for part in word.split(",") if part.startswith("--")}:
            assert (f"-l {flag[2:]} " if shell == "fish" else flag) in text, (verb, flag)


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_read_their_scripts(shell, tmp_path):
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell}")
    (tmp_path / "script").write_text(run("completion", shell))
    subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=60)


def test_fish_completes(tmp_path):
    if not shutil.which("fish"):
        pytest.skip("there is no fish")
    (tmp_path / "script").write_text(run("completion", "fish"))

    def complete(line):
        command = f"source {tmp_path}/script; complete -C '{line}'"
        done = subprocess.run(["fish", "--no-config", "-c", command], capture_output=True, text=True, timeout=60)
        assert not done.stderr
        return [line.split("\t")[0] for line in done.stdout.splitlines()]

    assert complete("heddle expl") == ["explain"] and complete("heddle explain lin") == ["linear"]
    assert complete("heddle explain linear --act") == ["--activation"]
    assert complete("heddle explain linear --activation gelu_t") == ["gelu_tanh"]
    assert complete("heddle quantize --format mx") == ["mxfp4"]


def test_the_command_alone_is_no_shell():
    assert "shell (bash, zsh or fish) is required" in run("completion", code=2)
