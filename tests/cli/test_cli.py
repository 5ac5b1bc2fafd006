"""The heddle command as its users call it: text, --json, exit codes. test_run.py, test_quantize.py, test_cli_gpu.py have more."""

import json
import os
import resource
import subprocess

import pytest
from command import CLI, built_with_cases, needs_command, run, run_json

pytestmark = needs_command


# ---------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("verb", ["info", "run", "bench", "check", "tune", "explain", "memory", "quantize"])
def test_every_verb_has_help_and_json(verb):
    assert verb in run("--help")
    text = run(verb, "--help")
    assert "--json" in text and "Usage: heddle " + verb in text
    assert text.rstrip().splitlines()[-1].startswith(f"Example: heddle {verb} ")


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


WITHOUT_CUDA = "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON"


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
    on_cpus_alone = {"sparse_attention_forward", "sparse_attention_backward"}
    with_reference |= on_cpus_alone | {"merge_attention", "merge_attention_backward"}
    assert with_reference | without_reference == set(operations)
    text = run("info")
    for name, candidates in operations.items():
        here = {c["name"] for c in candidates if c["device"] == "cpu" and c["runs"]}
        assert "cpu" in here and ("reference" in here) == (name in with_reference), name
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


def test_unknown_target_exits_with_3():
    assert "nonesuch" in run("info", "--target", "nonesuch", code=3)


# ------------------------------------------------------------------------------------------- explain, memory and bench


def test_explain_names_the_choice_and_the_reasons():
    out = run_json("explain", "--batch", 2, "--heads", 8, "--kv-heads", 2, "--causal", "bottom_right")
    chosen = [c for c in out["candidates"] if c["chosen"]]
    assert len(chosen) == 1 and chosen[0]["method"] == "flash"
    assert all("reason" in c for c in out["candidates"] if c["name"] == "reference")
    text = run("explain", "--batch", 2, "--heads", 8, "--kv-heads", 2)
    assert chosen[0]["name"] in text and "chosen" in text
    forced = run_json("explain", "--force", "reference")
    assert [c["name"] for c in forced["candidates"] if c["chosen"]] == ["reference"]


def test_explain_refuses_what_the_operation_refuses():
    assert "q's heads must be a multiple of k's" in run("explain", "--heads", 8, "--kv-heads", 3, code=2)
    assert "head size 257" in run("explain", "--head-size", 257, code=2)
    assert "--heads is -1" in run("explain", "--heads", -1, code=2)
    assert "dtype is 'int7'" in run("explain", "--dtype", "int7", code=2)


def chosen_on(gpu, *flags, **environment):
    out = run_json("explain", "--gpu", gpu, "--dtype", "bf16", *flags, **environment)
    assert out["assumed"] and out["problem"]["device"] == "cuda"
    return out["gpu"], next((c for c in out["candidates"] if c["chosen"]), None)


def test_explain_for_a_gpu_that_is_not_here():
    assert "gpu is 'v100': it must be one of a100, rtx4090, l40s, h100, h200" in run("explain", "--gpu", "v100", code=2)
    assert "gpu is '': it must be one of" in run("explain", "--gpu", "", code=2)
    if WITHOUT_CUDA in run("explain"):
        assert chosen_on("h100") == ("NVIDIA H100 80GB HBM3", None) and WITHOUT_CUDA in run("explain", "--gpu", "h100")
        return
    for gpu, product, prefix in [("a100", "NVIDIA A100-SXM4-80GB", "sm80"), ("rtx4090", "NVIDIA GeForce RTX 4090", "sm80"),
                                 ("h200", "NVIDIA H200", "sm90")]:  # fmt: skip
        for flags, suffix in [(["--bias", "--mask", "--alibi", "--sink"], ""), (["--packed"], ""), (["--pass", "backward"], ""),
                              (["--length", 1, "--keys", 8192, "--page-size", 16], "_decode")]:  # fmt: skip
            named, candidate = chosen_on(gpu, *flags)
            assert (named, candidate["name"]) == (product, prefix + suffix)
            assert candidate["estimated_seconds"] > 0
    text = run("explain", "--gpu", "l40s")
    assert "NVIDIA L40S, assumed" in text and "it needs a Hopper GPU (compute capability 9.0); this one has 8.9" in text


def test_a_tuning_file_is_for_the_gpu_it_was_made_on(tmp_path):
    if WITHOUT_CUDA in run("explain"):
        pytest.skip("no kernels to tune")
    made = {"name": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0", "multiprocessors": 132}
    file = tmp_path / "tuned.json"
    kernels = {"sm90 d64": {"fixed": 0.25, "flops": 1e15}}
    version = run_json("info")["version"]
    file.write_text(json.dumps({"schema": 1, "gpu": made, "version": version, "kernels": kernels}))
    tuned = dict(HEDDLE_TUNING=str(file))
    assert chosen_on("h200", **tuned) == chosen_on("h200")
    assert chosen_on("h100", "--force", "sm90", **tuned)[1]["estimated_seconds"] > 0.25
    assert chosen_on("h100", **tuned)[1]["name"] == "sm80" and chosen_on("h100")[1]["name"] == "sm90"


@pytest.mark.parametrize(
    "verb, flags, method",
    [
        ("linear", ["--rows", 16, "--norm", "rms_norm", "--activation", "swiglu", "--residual"], "linear"),
        ("linear", ["--pass", "backward", "--bias", "--activation", "silu"], "linear"),
        ("rotary", ["--heads", 4, "--length", 9], "rotary"),
        ("append", ["--batch", 3, "--page-size", 16, "--rotary"], "append"),
        ("append", ["--e4m3", "--scales", "--dtype", "bf16", "--keys", 0], "append"),
        ("append-int4", ["--batch", 2, "--keys", 500, "--rotary"], "append"),
        ("attention-int4", ["--batch", 2, "--kv-heads", 2, "--keys", 500, "--causal", "bottom_right"], "flash"),
        ("quantize", ["--rule", "mse", "--importance", "--inputs", 64], "quantize"),
        ("dequantize", ["--format", "int4_g64"], "dequantize"),
        ("unpack", ["--format", "mxfp4"], "unpack"),
    ],
)
def test_explain_of_every_operation(verb, flags, method):
    out = run_json("explain", verb, *flags)
    chosen = [c for c in out["candidates"] if c["chosen"]]
    assert [(c["name"], c["method"]) for c in chosen] == [("cpu", method)]
    assert chosen[0]["estimated_seconds"] > 0 and chosen[0]["plan"]
    assert all(c["supported"] or c["reason"] for c in out["candidates"]) and len(out["candidates"]) > 1
    text = run("explain", verb, *flags)
    assert "chosen" in text and f"cpu: {chosen[0]['plan']}" in text
    assert run_json("explain", verb, *flags, "--force", "sm9O")["candidates"][0]["chosen"] is False
    usage = run("explain", verb, "--help")
    assert "--json" in usage and usage.rstrip().splitlines()[-1].startswith(f"Example: heddle explain {verb} ")

    there = run_json("explain", verb, "--gpu", "h100", *([] if "--dtype" in flags else ["--dtype", "bf16"]), *flags)
    assert there["assumed"] and there["problem"]["device"] == "cuda"
    gpu = [c for c in there["candidates"] if c["method"] == method and c["name"] != "cpu"]
    if WITHOUT_CUDA in run("explain"):
        assert gpu and all(c["reason"] == WITHOUT_CUDA for c in gpu)
    else:
        assert [c["estimated_seconds"] > 0 for c in gpu if c["chosen"]] == [True]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("flags", [[], ["--parts", 3, "--packed", "--sink", "--float32-out", "--dtype", "bf16"]])
def test_explain_merge(flags, direction):
    flags = [*flags, "--pass", direction]
    out = run_json("explain", "merge", *flags)
    assert [(c["name"], c["method"], c["chosen"]) for c in out["candidates"]] == [
        ("cpu", "merge", True),
        ("reference", "reference", False),
        ("cuda", "merge", False),
    ]
    assert out["pass"] == direction and out["problem"]["parts"] == (3 if "--parts" in flags else 2)
    assert out["candidates"][0]["estimated_seconds"] > 0 and out["candidates"][0]["plan"]
    text = run("explain", "merge", *flags)
    assert f", {direction}, " in text and f"cpu: {out['candidates'][0]['plan']}" in text
    forced = run_json("explain", "merge", *flags, "--force", "reference")["candidates"]
    assert [c["name"] for c in forced if c["chosen"]] == ["reference"]
    usage = run("explain", "merge", "--help")
    assert "--json" in usage and usage.rstrip().splitlines()[-1].startswith("Example: heddle explain merge ")

    there = run_json("explain", "merge", "--gpu", "h100", *flags)
    assert there["assumed"] and there["problem"]["device"] == "cuda" and there["problem"]["dtype"] == "bfloat16"
    built = run_json("info")["gpu"]["kernels"]
    assert [c["name"] for c in there["candidates"] if c["chosen"]] == (["cuda"] if built else [])
    on_cpus = {c["reason"] for c in there["candidates"] if c["name"] != "cuda"}
    assert on_cpus == {"it runs on another device than the tensors are on"}


def test_gradients_of_merges_are_another_call():
    seconds = [
        run_json("explain", "merge", "--pass", p)["candidates"][0]["estimated_seconds"] for p in ("forward", "backward")
    ]
    assert seconds[1] > seconds[0]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "flags", [[], ["--packed", "--batch", 2, "--query-rows", 16, "--counts"], ["--length", 65, "--query-rows", 4]]
)
def test_explain_sparse(flags, direction):
    flags = [*flags, "--pass", direction]
    out = run_json("explain", "sparse", *flags)
    assert [c["name"] for c in out["candidates"] if c["chosen"]] == ["cpu"] and out["pass"] == direction
    assert "lists [" in run("explain", "sparse", *flags)
    there = run_json("explain", "sparse", "--gpu", "h100", *flags)
    assert there["assumed"] and not any(c["chosen"] for c in there["candidates"])
    assert {c["reason"] for c in there["candidates"]} == {"it runs on another device than the tensors are on"}
    usage = run("explain", "sparse", "--help")
    assert "--json" in usage and usage.rstrip().splitlines()[-1].startswith("Example: heddle explain sparse ")


def test_explain_names_every_operation():
    usage = run("explain", "--help")
    for verb in "sparse merge linear rotary append append-int4 attention-int4 quantize dequantize unpack".split():
        assert f"\n  {verb} " in usage


def test_explain_of_every_operation_refuses_what_the_operation_refuses():
    assert "--rows is 0: it must be at least 1" in run("explain", "linear", "--rows", 0, code=2)
    assert "--heads is -2" in run("explain", "rotary", "--heads", -2, code=2)
    assert "format is 'int3'" in run("explain", "quantize", "--format", "int3", code=2)
    assert "rule is floor, which nvfp4 does not have" in run("explain", "quantize", "--rule", "floor", code=2)
    assert "scales are for a float8_e4m3fn cache" in run("explain", "append", "--scales", code=2)
    assert "must be a multiple of 64" in run("explain", "append-int4", "--head-size", 96, code=2)
    assert "must be a multiple of 64" in run("explain", "attention-int4", "--head-size", 96, code=2)
    assert "--keys is 0: it must be at least 1" in run("explain", "attention-int4", "--keys", 0, code=2)
    assert "block_size is 48" in run("explain", "sparse", "--block-size", 48, code=2)
    assert "--entries is 0: it must be at least 1" in run("explain", "sparse", "--entries", 0, code=2)
    assert "--parts is 0: it must be at least 1" in run("explain", "merge", "--parts", 0, code=2)
    assert "has head size 257: it must be from 1 to 256" in run("explain", "merge", "--head-size", 257, code=2)
    assert "--pass" in run("explain", "merge", "--pass", "both", code=2)
    assert "order dense is for GPUs" in run("explain", "linear", "--order", "dense", code=2)


@pytest.mark.parametrize("flags", [["--packed"], ["--page-size", 5], ["--bias", "--mask", "--alibi", "--sink"]])
def test_explain_with_features(flags):
    out = run_json("explain", "--length", 65, *flags)
    assert sum(c["chosen"] for c in out["candidates"]) == 1


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


# --------------------------------------------------------------------------------------------------------------- check


def test_devices_that_there_are_not():
    assert "--device" in run("explain", "--device", "tpu", code=2)


def test_check_passes_and_reports():
    if not built_with_cases():
        assert "HEDDLE_BUILD_TESTS=ON" in run("check", code=3)
        return
    out = run_json("check", "--purpose", "round", "--name", "s64", "--dtype", "f32")
    assert out["checked"] == len(out["results"]) > 0 and out["failed"] == 0
    for result in out["results"]:
        assert result["passed"] and result["purpose"] == "round" and "s64" in result["case"]
        assert all(t["error"] <= t["bound"] and t["compared"] > 0 for t in result["tensors"].values())
    only = run_json("check", "--name", "s64_d64_f32", "--candidate", "cpu_baseline", "--pass", "forward",
                    "--all-targets")  # fmt: skip
    targets = run_json("info")["runnable_targets"]
    assert [r["target"] for r in only["results"]] == targets
    text = run("check", "--name", "s64_d64_f32")
    assert "ok" in text and "0 failed" in text


def test_check_lists_cases_of_8_bits():
    if built_with_cases():
        names = [case["name"] for case in run_json("check", "--list", "--dtype", "e4m3")]
        assert names and all(name.endswith("_e4m3") for name in names)


def test_check_writes_digests(tmp_path):
    if not built_with_cases():
        return
    files = [tmp_path / "a", tmp_path / "b"]
    for file, candidate in zip(files, ("cpu", "cpu_baseline"), strict=True):
        run("check", "--name", "s64_d64_f32", "--candidate", candidate, "--digest", str(file))
    lines = [file.read_text(encoding="utf-8").splitlines() for file in files]
    assert [line.split()[1:4:2] for line in lines[0]] == [
        ["forward", "o"],
        ["forward", "lse"],
        *(["backward", f"d{x}"] for x in "qkv"),
    ]
    assert len(lines[1]) == 2 and {line.split()[2] for line in lines[1]} == {"cpu_baseline"}
    # Two candidates sum in orders of their own.
    assert lines[0][0].split()[4] != lines[1][0].split()[4]
    again = tmp_path / "again"
    run("check", "--name", "s64_d64_f32", "--candidate", "cpu", "--digest", str(again))
    assert again.read_text(encoding="utf-8").splitlines() == lines[0]
    assert "cannot" in run("check", "--name", "s64_d64_f32", "--digest", str(tmp_path / "none" / "a"), code=3)


def test_check_goes_through_every_operation(tmp_path):
    if not built_with_cases():
        return
    few = ["--operation", "all", "--name", "s64_d64_f32", "merge_sink", "sparse_sink", "linear_nvfp4_m8_"]
    file = tmp_path / "digest"
    out = run_json("check", *few, "--candidate", "cpu", "--digest", file)
    assert out["failed"] == 0
    found = {(r["operation"], r["case"], r["pass"]): sorted(r["tensors"]) for r in out["results"]}
    assert found["attention", "round_s64_d64_f32", "forward"] == ["lse", "o"]
    assert found["merge_attention", "merge_sink", "forward"] == ["lse", "o"]
    gradients = ["d_lse0", "d_lse1", "d_lse2", "d_o0", "d_o1", "d_o2", "dsink"]
    assert found["merge_attention", "merge_sink", "backward"] == gradients
    assert found["sparse_attention", "sparse_sink", "forward"] == ["lse", "o"]
    assert found["sparse_attention", "sparse_sink", "backward"] == ["dk", "dq", "dsink", "dv"]
    for dtype in ("f32", "f16", "bf16"):
        assert found["linear", f"linear_nvfp4_m8_{dtype}", "forward"] == ["y"]
        assert "dx" in found["linear", f"linear_nvfp4_m8_{dtype}", "backward"]
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == sum(map(len, found.values())) == len({tuple(line.split()[:4]) for line in lines})
    for line in lines:
        name, way, candidate, tensor, digest, _ = line.split()
        assert candidate == "cpu" and len(digest) == 16
        assert any(key[1:] == (name, way) and tensor in tensors for key, tensors in found.items())


def test_check_lists_every_operation():
    if not built_with_cases():
        return
    rows = run_json("check", "--list", "--operation", "all")
    by_operation = {}
    for row in rows:
        by_operation.setdefault(row["operation"], []).append(row["name"])
    assert list(by_operation) == ["attention", "merge_attention", "sparse_attention", "linear"]
    alone = run_json("check", "--list")
    assert [row["name"] for row in alone] == by_operation["attention"]
    # Linear layers have a table for each pass, with names in common; all else is unique.
    assert len({name for names in by_operation.values() for name in names}) == len(rows) - len(
        [name for name in set(by_operation["linear"]) if by_operation["linear"].count(name) == 2]
    )
    assert "lists of 4 blocks of 16 keys" in run(
        "check", "--list", "--operation", "sparse_attention", "--name", "plain"
    )
    assert "others than attention" in run("check", "--help")
    assert "the cases of linear are the CPU's" in run("check", "--operation", "linear", "--device", "cuda", code=2)
    assert "no case of the table is left" in run("check", "--operation", "linear", "--precision", "tf32", code=2)


def test_check_refuses_an_empty_choice():
    if built_with_cases():
        assert "no case of the table is left" in run("check", "--name", "nonesuch", code=2)
        assert "none of the chosen cases has a candidate" in run("check", "--name", "s64_d64_f32", "--candidate", "x",
                                                                 code=2)  # fmt: skip
