"""The heddle command as its users call it: text, --json, exit codes. test_doctor.py, test_explain.py, test_check.py, test_run.py,
test_quantize.py, test_cli_gpu.py have more."""

import json
import os
import resource
import subprocess

import numpy as np
import pytest
from command import CLI, WITHOUT_CUDA, built_with_cases, examples, needs_command, run, run_json, save
from safetensors.numpy import save_file

pytestmark = needs_command


# ---------------------------------------------------------------------------------------------------------------- help


VERBS = ["doctor", "info", "run", "bench", "check", "tune", "explain", "memory", "quantize", "draw", "completion"]
BELOW = {
    "bench": "linear",
    "explain": "sparse adaptive pool select gate step merge linear rotary append append-int4 attention-int4 quantize dequantize unpack",
}
ALL = [(verb,) for verb in VERBS] + [(verb, sub) for verb, below in BELOW.items() for sub in below.split()]


def test_help_names_every_verb():
    for path in [(), *((verb,) for verb in BELOW)]:
        names = run(*path, "--help").split("Subcommands:\n")[1].split("\n\n")[0]
        assert [line.split()[0] for line in names.splitlines()] == [p[-1] for p in ALL if p[:-1] == path]


@pytest.fixture
def folder(tmp_path):
    """One that has what examples name."""
    random = np.random.default_rng(7)
    tensors = {name: random.standard_normal((1, 33, 2, 16)).astype(np.float32) for name in "qkv"}
    save(tmp_path, **tensors)
    save_file(tensors, tmp_path / "qkv.safetensors")
    weights = {
        f"model.layers.0.{name}.weight": random.standard_normal((64, 128)).astype(np.float32)
        for name in ("mlp.up_proj", "mlp.down_proj", "embed")
    }
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "Llama-3.2-1B").mkdir()
    save_file(weights, tmp_path / "Llama-3.2-1B" / "model.safetensors")
    for home in (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"):
        (tmp_path / home).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("verb", ALL, ids=" ".join)
def test_examples_of_help_run(folder, verb):
    (folder / "heddle").symlink_to(CLI)
    if verb[0] in ("check", "tune") and not built_with_cases():
        pytest.skip("this build has no cases")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    gpus = run_json("info")["gpu"]["gpus"]
    for line in examples(*verb):
        if gpus and (verb == ("tune",) or "cuda" in line):
            continue  # they take minutes there; the tests on a GPU run their kin
        quick = line + " --seconds 0" if verb[0] == "bench" else line
        done = subprocess.run(
            ["bash", "-c", quick], cwd=folder, capture_output=True, text=True, timeout=300,
            env={**os.environ, "PATH": path, "HOME": str(folder)},
        )  # fmt: skip
        absent = verb == ("tune",) or "--device cuda" in line
        assert done.returncode == (3 if absent else 0), f"{quick}\n{done.stdout}\n{done.stderr}"


def test_version():
    assert run("--version").startswith("heddle ")


@pytest.mark.parametrize("arguments", [[], ["weave"], ["info", "--nonsense"], ["bench", "--threads", "0"]])
def test_wrong_command_lines_exit_with_2(arguments):
    assert "--help" in run(*arguments, code=2)


@pytest.mark.parametrize(
    "word, end",
    [
        ("explian", "; did you mean explain?"),
        ("quantise", "; did you mean quantize?"),
        ("chek", "; did you mean check?"),
        ("weave", ""),
    ],
)
def test_unknown_subcommands_are_named(word, end):
    assert run(word, "--json", code=2).splitlines()[0] == f"unknown subcommand '{word}'{end}"


@pytest.mark.parametrize(
    "words, what",
    [
        (["explain", "--lenght", 4], "unknown flag '--lenght'; did you mean --length?"),
        (["memory", "--lenght=4"], "unknown flag '--lenght'; did you mean --length?"),
        (["explain", "linear", "--formt", "nvfp4"], "unknown flag '--formt'; did you mean --format?"),
        (["explain", "--dtpye", "bf16", "linear"], "unknown flag '--dtpye'; did you mean --dtype?"),
        (["quantize", "model", "--oot", "there"], "unknown flag '--oot'; did you mean --out?"),
        (["info", "--nonsense"], "unknown flag '--nonsense'"),
        (["explain", "linaer"], "unknown subcommand 'linaer'; did you mean linear?"),
        (["explain", "weave"], "unknown subcommand 'weave'"),
        (["info", "extra"], "The following argument was not expected: extra"),
        (["bench", "linaer"], "unknown subcommand 'linaer'; did you mean linear?"),
    ],
)
def test_unknown_flags_and_words_are_named(words, what):
    assert run(*words, code=2).splitlines()[0] == what


@pytest.mark.parametrize("value", ["x", "4.5"])
def test_what_is_no_number_is_named(value):
    said = run("explain", "--length", value, code=2).splitlines()[0]
    assert said == f"--length is '{value}': it must be a number that fits"


@pytest.mark.parametrize(
    "words, flag, value, meant",
    [
        (["explain", "--dtype", "bf61"], "--dtype", "bf61", "bf16"),
        (["explain", "--causal", "topleft"], "--causal", "topleft", "top_left"),
        (["explain", "--method=flahs"], "--method", "flahs", "flash"),
        (["explain", "--force", "sm9O"], "--force", "sm9O", "sm90"),
        (["explain", "--gpu", "H100"], "--gpu", "H100", "h100"),
        (["explain", "--pass", "bakward"], "--pass", "bakward", "backward"),
        (["explain", "linear", "--format", "nvpf4"], "--format", "nvpf4", "nvfp4"),
        (["explain", "linear", "--activation", "gelu_ref"], "--activation", "gelu_ref", "gelu_erf"),
        (["explain", "linear", "--norm", "rmsnorm"], "--norm", "rmsnorm", "rms_norm"),
        (["explain", "unpack", "--order", "row16"], "--order", "row16", "rows16"),
        (["bench", "--dtype", "f32", "bf61"], "--dtype", "bf61", "bf16"),
        (["quantize", "model", "--rule", "foursix"], "--rule", "foursix", "four_six"),
        (["info", "--target", "avx3"], "--target", "avx3", "avx2"),
        (["completion", "bahs"], "shell", "bahs", "bash"),
        (["memory", "--dtype", "complex"], "--dtype", "complex", None),
    ],
)
def test_unknown_values_are_named(words, flag, value, meant):
    said = run(*words, code=2)
    assert said.startswith(f"heddle: {flag} is '{value}': it must be one of ")
    assert said.rstrip().endswith(f"; did you mean {meant}?") if meant else "did you mean" not in said


def test_values_have_other_names_too():
    assert run_json("explain", "--dtype", "bfloat16")["problem"] == run_json("explain", "--dtype", "bf16")["problem"]
    assert run_json("explain", "quantize", "--format", "nf4_b128")["problem"]["format"] == "nf4_b128"


def test_no_colours_without_a_terminal():
    assert "\x1b" not in run("info") + run("explain")


# ---------------------------------------------------------------------------------------------------------------- info


def test_info():
    info = run_json("info")
    assert info["target"] in info["runnable_targets"]
    assert info["targets"][info["target"]] == "chosen"
    assert info["machine"]["processors"] >= 1
    names = [c["name"] for c in info["operations"]["attention_forward"]]
    assert "cpu" in names and "cpu_baseline" in names
    text = run("info")
    assert info["version"] in text and info["target"] in text


def test_info_says_what_gpus_there_are():
    gpu, text = run_json("info")["gpu"], run("info")
    if not gpu["kernels"]:
        assert gpu["absence"] == WITHOUT_CUDA and not gpu["gpus"]
        assert f"none in this build: {WITHOUT_CUDA}" in text
    else:
        assert bool(gpu["gpus"]) != ("absence" in gpu) and f"of CUDA {gpu['built_with_cuda']}" in text
    for found in gpu["gpus"]:
        assert found["name"] in text and found["multiprocessors"] > 0 and found["memory_bytes"] > 0


def test_info_lists_every_candidate_and_whether_it_runs():
    found = run_json("info")
    gpus, operations = found["gpu"]["gpus"], found["operations"]
    without_reference = {"apply_rotary", "append_kv_cache", "append_int4_cache", "unpack_weights"}
    with_reference = {
        "attention_forward",
        "attention_backward",
        "linear_forward",
        "linear_backward",
        "quantize",
        "dequantize",
    }
    with_reference |= {
        "sparse_attention_forward",
        "sparse_attention_backward",
        "adaptive_attention_forward",
        "adaptive_attention_backward",
        "pool_keys",
        "pool_keys_backward",
        "select_blocks",
        "merge_attention",
        "merge_attention_backward",
    }
    on_cpus_alone = {"adaptive_attention_forward", "adaptive_attention_backward"}
    on_gpus_alone = {"gate_branches", "gate_branches_backward", "nsa_step"}
    with_reference |= on_cpus_alone | (on_gpus_alone - {"nsa_step"})
    assert with_reference | without_reference | on_gpus_alone == set(operations)
    text = run("info")
    for name, candidates in operations.items():
        here = {c["name"] for c in candidates if c["device"] == "cpu" and c["runs"]}
        assert ("cpu" in here) == (name not in on_gpus_alone) and ("reference" in here) == (name in with_reference), (
            name
        )
        on_gpus = [c for c in candidates if c["device"] == "cuda"]
        assert bool(on_gpus) == (name not in on_cpus_alone), name
        for candidate in on_gpus:
            assert candidate["runs"] != ("reason" in candidate) and candidate["name"] in text
            if not gpus:
                assert not candidate["runs"]
            if not found["gpu"]["kernels"]:
                assert candidate["reason"] == WITHOUT_CUDA
    if not found["gpu"]["kernels"]:
        for verb in ("explain", "memory"):
            asked = run_json(verb)["candidates"]
            assert {c.get("reason", c.get("refusal")) for c in asked if c["name"].startswith("sm")} == {WITHOUT_CUDA}


def test_info_says_what_became_of_a_tuning_file(tmp_path):
    file = tmp_path / "tuning.json"
    gpu = {"name": "a GPU that nobody has", "compute_capability": "9.0", "multiprocessors": 7}
    file.write_text(json.dumps({"schema": 1, "gpu": gpu, "version": "0.0.1", "kernels": {"of old": {}}}))
    said = run_json("info", HEDDLE_TUNING=str(file))["gpu"]["tuning"]
    assert "tuning" not in run_json("info", HEDDLE_TUNING="")["gpu"]
    if not run_json("info")["gpu"]["kernels"]:
        assert said == f"{file}: not read, as this build has no GPU kernels"
        return
    made = "a GPU that nobody has (9.0, 7 multiprocessors) for version 0.0.1"
    assert said.startswith(f"{file}: ignored, made on {made}; ") and made in run("info", HEDDLE_TUNING=str(file))


def test_info_obeys_target_and_threads():
    worst = run_json("info")["runnable_targets"][-1]
    info = run_json("info", "--target", worst, "--threads", 3)
    assert (info["target"], info["threads"]) == (worst, 3)
    assert run_json("info", HEDDLE_CPU_TARGET=worst, HEDDLE_NUM_THREADS="1")["target"] == worst


def test_threads_that_cannot_be_started_are_an_error():
    """And no hang."""
    done = subprocess.run(
        [CLI, "info"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HEDDLE_NUM_THREADS": "400"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),  # the stacks of 128
    )
    assert done.returncode == 3
    assert "400 threads are wanted and " in done.stderr and "HEDDLE_NUM_THREADS asks for fewer" in done.stderr
    assert "'4097'" in run("info", HEDDLE_NUM_THREADS="4097", code=3)


def test_a_target_that_does_not_run_here_exits_with_3():
    info = run_json("info")
    other = next(target for target in info["targets"] if target not in info["runnable_targets"])
    assert f"CPU target '{other}'" in run("info", "--target", other, code=3)
    assert "--target is 'nonesuch'" in run("info", "--target", "nonesuch", code=2)


# --------------------------------------------------------------------------------------------------- memory and bench


def test_memory_counts_tensors_and_scores():
    shape = dict(B=2, H=8, Hkv=2, Sq=512, Sk=2048, D=64)
    out = run_json("memory", "--batch", 2, "--heads", 8, "--kv-heads", 2, "--length", 512, "--keys", 2048, "--head-size",
                   64, "--dtype", "bf16", "--limit", "1GiB", "--layers", 12)  # fmt: skip
    assert out["score_matrix_bytes"] == 4 * shape["B"] * shape["H"] * shape["Sq"] * shape["Sk"]
    assert out["tensors"]["q"] == 2 * 2 * 512 * 8 * 64
    assert out["tensors"]["k"] == 2 * 2 * 2048 * 2 * 64
    assert out["tensors"]["lse"] == 4 * 2 * 8 * 512
    assert out["kv_cache_bytes"] == 12 * (out["tensors"]["k"] + out["tensors"]["v"])
    served = [c for c in out["candidates"] if "refusal" not in c]
    assert {"cpu", "cpu_baseline"} <= {c["name"] for c in served}
    for candidate in served:
        assert candidate["total_bytes"] == out["tensors"]["total"] + candidate["workspace_bytes"]


def test_memory_finds_the_longest_sequence_that_fits():
    limit = 256 << 20
    out = run_json("memory", "--heads", 4, "--limit", "256MiB")
    by_name = {c["name"]: c for c in out["candidates"] if "refusal" not in c}
    assert by_name["cpu"]["longest_within_limit"] > 4 * by_name["cpu_baseline"]["longest_within_limit"]
    for name, candidate in by_name.items():
        longest = candidate["longest_within_limit"]
        fits = {
            length: next(
                c["total_bytes"]
                for c in run_json("memory", "--heads", 4, "--length", length, "--limit", "1MiB")["candidates"]
                if c["name"] == name
            )
            for length in (longest, longest + 1)
        }
        assert fits[longest] <= limit < fits[longest + 1], name
    assert "longest in 256.00 MiB" in run("memory", "--heads", 4, "--limit", "256MiB")


def test_memory_refuses_a_limit_that_is_none():
    assert "is not an amount of memory" in run("memory", "--limit", "plenty", code=2)


def test_bench_reports_rates():
    out = run_json("bench", "--length", 64, "--heads", 2, "--head-size", 32, "--dtype", "f32", "bf16", "--pass", "both",
                   "--seconds", 0.01, "--threads", 1)  # fmt: skip
    assert [(r["problem"]["dtype"], r["pass"]) for r in out["rows"]] == [
        ("float32", "forward"), ("float32", "backward"), ("bfloat16", "forward"), ("bfloat16", "backward")]  # fmt: skip
    for row in out["rows"]:
        assert row["seconds_p10"] <= row["seconds"] <= row["seconds_p90"] and row["runs"] >= 5
        work = (2 * 64 if row["pass"] == "forward" else 2 * 5 * 32) * 2 * 64 * 64
        assert row["flops"] == pytest.approx(work / row["seconds"])
    assert out["peak_flops"] > 1e9 and out["threads"] == 1
    assert "GFLOP/s" in run("bench", "--length", 64, "--seconds", 0)


def test_bench_counts_only_attended_pairs():
    flags = ["--length", 100, "--heads", 1, "--head-size", 8, "--seconds", 0, "--threads", 1]
    row = run_json("bench", *flags, "--causal", "top_left")["rows"][0]
    assert row["flops"] * row["seconds"] == pytest.approx(5050 * 2 * 16)
    row = run_json("bench", *flags, "--causal", "top_left", "--window", 9, -1)["rows"][0]
    assert row["flops"] * row["seconds"] == pytest.approx((45 + 91 * 10) * 2 * 16)
    row = run_json("bench", *flags, "--keys", 7, "--causal", "top_left", "--key-step", 16)["rows"][0]
    assert row["flops"] * row["seconds"] == pytest.approx(sum(t // 16 + 1 for t in range(100)) * 2 * 16)


@pytest.mark.parametrize(
    "format, flags", [("nvfp4", []), ("int4_g64_zp", ["--dtype", "bf16"]), ("int8_row", ["--int8-x"])]
)
def test_bench_of_linear_layers(format, flags):
    flags = ["linear", "--rows", 1, 9, "--outputs", 96, "--inputs", 128, "--format", format, "--seconds", 0, *flags]
    out = run_json("bench", *flags, "--threads", 1)
    assert [(r["problem"]["rows"], r["problem"]["format"], r["candidate"]) for r in out["rows"]] == [
        (1, format, "cpu"),
        (9, format, "cpu"),
    ]
    for row in out["rows"]:
        assert 0 < row["seconds_p10"] <= row["seconds"] <= row["seconds_p90"] and row["runs"] >= 5
        assert row["flops"] * row["seconds"] == pytest.approx(2 * row["problem"]["rows"] * 96 * 128)
        assert 96 * 128 / 2 < row["weights_bytes"] < 2 * 96 * 128
    assert "GB/s of weights" in run("bench", *flags)


def test_bench_of_linear_layers_refuses_what_they_refuse():
    assert "--rows is 0: it must be at least 1" in run("bench", "linear", "--rows", 0, code=2)
    assert "K is 65: nvfp4 needs a multiple of its group" in run("bench", "linear", "--inputs", 65, code=2)
    assert "fp8_x is set and the format is nf4" in run("bench", "linear", "--format", "nf4", "--fp8-x", code=2)
    assert "which cannot serve this call" in run("bench", "linear", "--force", "sm90_w4a8", "--outputs", 16, "--inputs", 16, code=2)  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- check


def test_devices_that_there_are_not():
    assert "--device" in run("explain", "--device", "tpu", code=2)
