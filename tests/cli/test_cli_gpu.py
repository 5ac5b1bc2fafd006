"""The heddle command on a GPU, and what it says where there is none."""

import json

import numpy as np
import pytest
from command import built_with_cases, needs_command, run, run_json, save, softmax_attention

pytestmark = needs_command


@pytest.mark.parametrize(
    "arguments",
    [*([verb, "--device", "cuda"] for verb in ("explain", "memory", "bench")), ["run", "--device", "cuda", "-o", "o.npy"],
     ["bench", "linear", "--device", "cuda"], ["tune"], ["tune", "--json", "--out", "tuned.json"]],
)  # fmt: skip
def test_without_a_gpu_its_verbs_say_so(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpu = run_json("info")["gpu"]
    if gpu["gpus"]:
        pytest.skip("there is a GPU")
    if arguments[0] == "tune" and not built_with_cases():
        assert "HEDDLE_BUILD_TESTS=ON" in run("tune", code=3)
        return
    said = run(*arguments, code=3)
    assert said.startswith(f"heddle: [{arguments[0]}] ") and gpu["absence"] in said
    assert not list(tmp_path.iterdir())


@pytest.fixture
def gpu():
    found = run_json("info")["gpu"]["gpus"]
    if not found or not built_with_cases():
        pytest.skip("there is no GPU, or no kit to reach it")
    return found[0]


def test_run_on_a_gpu(gpu, tmp_path, tensors):
    q, k, v = (x.astype(np.float16) for x in tensors)
    random = np.random.default_rng(5)
    bias = random.standard_normal((1, 4, 33, 33)).astype(np.float32)
    flags = save(tmp_path, q=np.asfortranarray(q), k=k, v=v, bias=bias)
    out, lse = tmp_path / "o.npy", tmp_path / "lse.npy"
    said = run_json("run", *flags, "--device", "cuda", "--causal", "top_left", "-o", out, "--lse", lse)
    o, expected_lse = softmax_attention(q, k, v, causal=True, bias=bias)
    assert said["gpu"] == gpu["name"] and said["candidate"].startswith("sm") and said["seconds"] > 0
    np.testing.assert_allclose(np.load(out), o, rtol=0, atol=4e-3)
    np.testing.assert_allclose(np.load(lse), expected_lse, rtol=0, atol=4e-3)


def test_run_packed_sequences_on_a_gpu(gpu, tmp_path):
    random = np.random.default_rng(8)
    q, k, v = (random.standard_normal((20, 2, 8)).astype(np.float16) for _ in range(3))
    np.save(tmp_path / "cu.npy", np.array([0, 7, 7, 20], np.int32))
    cu = ["--cu-seqlens-q", tmp_path / "cu.npy", "--cu-seqlens-k", tmp_path / "cu.npy"]
    run("run", *save(tmp_path, q=q, k=k, v=v), *cu, "--device", "cuda", "-o", tmp_path / "o.npy")
    for begin, end in [(0, 7), (7, 20)]:
        o, _ = softmax_attention(q[None, begin:end], k[None, begin:end], v[None, begin:end])
        np.testing.assert_allclose(np.load(tmp_path / "o.npy")[begin:end], o[0], rtol=0, atol=4e-3)


@pytest.mark.parametrize("flags", [[], ["--packed"], ["--page-size", 16], ["--bias", "--mask", "--alibi", "--sink"]])
def test_explain_memory_and_bench_on_a_gpu(gpu, flags):
    flags = [*flags, "--device", "cuda", "--length", 256, "--dtype", "bf16"]
    chosen = [c["name"] for c in run_json("explain", *flags)["candidates"] if c["chosen"]]
    assert len(chosen) == 1 and chosen[0].startswith("sm")
    memory = run_json("memory", *flags)
    needs = {c["name"]: c for c in memory["candidates"] if "refusal" not in c}
    assert memory["limit_bytes"] == gpu["memory_bytes"] and chosen[0] in needs
    assert not {"cpu", "reference"} & set(needs)
    bench = run_json("bench", *flags, "--seconds", 0.01, "--pass", "forward" if "--page-size" in flags else "both")
    assert bench["gpu"] == gpu["name"] and "peak_flops" not in bench
    for row in bench["rows"]:
        assert row["seconds"] > 0 and row["candidate"].startswith("sm") and row["runs"] >= 5


def test_tune_writes_a_file_that_is_used(gpu, tmp_path):
    file = tmp_path / "tuned.json"
    rows = run_json("tune", "--out", file)["rows"]
    assert {
        "sm80 d64",
        "sm80 f32",
        "sm80_bwd d64",
        "sm80_bwd f32",
        "sm80_linear int4",
        "sm80_linear int4 few rows",
        "sm80_sparse by blocks",
        "sm80_sparse by rows",
    } <= {row["kernel"] for row in rows if "seconds" in row}
    said = run_json("info", HEDDLE_TUNING=str(file))["gpu"]["tuning"]
    assert said.startswith(f"{file}: used, made on {gpu['name']} ")
    moved = json.loads(file.read_text())
    moved["gpu"]["multiprocessors"] += 1
    file.write_text(json.dumps(moved))
    assert f"{file}: ignored, " in run_json("info", HEDDLE_TUNING=str(file))["gpu"]["tuning"]
    file.write_text("{}")
    assert "'schema' is missing" in run(
        "explain", "--device", "cuda", "--dtype", "bf16", code=2, HEDDLE_TUNING=str(file)
    )


@pytest.mark.parametrize(
    "flags", [["--format", "nvfp4"], ["--format", "int8_row", "--int8-x"], ["--format", "fp8_row", "--fp8-x"]]
)
def test_bench_of_linear_layers_on_a_gpu(gpu, flags):
    shape = ["--rows", 1, 64, "--outputs", 1024, "--inputs", 512, "--seconds", 0.01]
    out = run_json("bench", "linear", *shape, *flags, "--device", "cuda")
    assert out["gpu"] == gpu["name"] and [row["problem"]["rows"] for row in out["rows"]] == [1, 64]
    for row in out["rows"]:
        assert row["candidate"] not in ("", "cpu") and row["problem"]["dtype"] == "bfloat16" and row["seconds"] > 0
