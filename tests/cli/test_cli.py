"""The heddle command as its users call it: text, --json, files in and out, exit codes; test_quantize.py has `quantize`."""

import io
import json
import os
import pathlib
import resource
import stat
import struct
import subprocess

import numpy as np
import pytest
from command import CLI, needs_command, run, run_json

pytestmark = needs_command


def softmax_attention(q, k, v, *, causal=False, bias=None, mask=None):
    """Plain attention in float64: q [B, Sq, H, D], k and v [B, Sk, Hkv, D]. Returns o and the log-sum-exp."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x.astype(np.float64), group, axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k) / np.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    o = np.einsum("bhij,bjhd->bihd", weights / total, v)
    return o, (np.log(total) + top)[..., 0]


@pytest.fixture
def tensors():
    random = np.random.default_rng(3)

    def make(*shape, dtype=np.float32):
        return random.standard_normal(shape).astype(dtype)

    return make(2, 33, 4, 24), make(2, 33, 2, 24), make(2, 33, 2, 16)


def save(folder: pathlib.Path, **arrays):
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return [x for name in arrays for x in (f"--{name}", folder / f"{name}.npy")]


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
    [("explian", "; did you mean explain?"), ("quantise", "; did you mean quantize?"), ("chek", "; did you mean check?"), ("weave", "")],
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
    assert {"attention_forward", "attention_backward", "linear_forward", "linear_backward"} == set(operations)
    text = run("info")
    for name, candidates in operations.items():
        assert {c["name"] for c in candidates if c["device"] == "cpu" and c["runs"]} >= {"cpu", "reference"}, name
        on_gpus = [c for c in candidates if c["device"] == "cuda"]
        assert on_gpus, name
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


# ----------------------------------------------------------------------------------------------------------------- run


@pytest.mark.parametrize("method", ["flash", "baseline"])
def test_run_agrees_with_numpy(tmp_path, tensors, method):
    q, k, v = tensors
    out, lse = tmp_path / "o.npy", tmp_path / "lse.npy"
    said = run_json("run", *save(tmp_path, q=q, k=k, v=v), "-o", out, "--lse", lse, "--method", method)
    o, expected_lse = softmax_attention(q, k, v)
    assert said["o"] == list(o.shape) and said["seconds"] > 0
    np.testing.assert_allclose(np.load(out), o, rtol=0, atol=2e-6)
    np.testing.assert_allclose(np.load(lse), expected_lse, rtol=0, atol=4e-6)
    assert np.load(out).dtype == np.float32


def test_run_with_options(tmp_path, tensors):
    q, k, v = tensors
    random = np.random.default_rng(5)
    bias = random.standard_normal((1, 4, 33, 33)).astype(np.float32)
    mask = random.random((2, 1, 33, 33)) < 0.8
    mask |= np.eye(33, dtype=bool)
    flags = save(tmp_path, q=q, k=k, v=v, bias=bias, mask=mask)
    run("run", *flags, "--causal", "top_left", "-o", tmp_path / "o.npy")
    o, _ = softmax_attention(q, k, v, causal=True, bias=bias, mask=mask)
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), o, rtol=0, atol=4e-6)


def test_run_reads_fortran_order_and_half_precision(tmp_path, tensors):
    q, k, v = (x.astype(np.float16) for x in tensors)
    run("run", *save(tmp_path, q=np.asfortranarray(q), k=k, v=v), "-o", tmp_path / "o.npy")
    got = np.load(tmp_path / "o.npy")
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, softmax_attention(q, k, v)[0], rtol=0, atol=4e-3)


def test_run_packed_sequences(tmp_path):
    random = np.random.default_rng(8)
    q, k, v = (random.standard_normal((20, 2, 8)).astype(np.float32) for _ in range(3))
    cu = np.array([0, 7, 7, 20], np.int32)
    flags = save(tmp_path, q=q, k=k, v=v) + [
        "--cu-seqlens-q", tmp_path / "cu.npy", "--cu-seqlens-k", tmp_path / "cu.npy"]  # fmt: skip
    np.save(tmp_path / "cu.npy", cu)
    run("run", *flags, "-o", tmp_path / "o.npy", "--lse", tmp_path / "lse.npy")
    for begin, end in [(0, 7), (7, 20)]:
        o, lse = softmax_attention(q[None, begin:end], k[None, begin:end], v[None, begin:end])
        np.testing.assert_allclose(np.load(tmp_path / "o.npy")[begin:end], o[0], rtol=0, atol=2e-6)
        np.testing.assert_allclose(np.load(tmp_path / "lse.npy")[:, begin:end], lse[0], rtol=0, atol=2e-6)


def safetensors_bytes(**arrays):
    header, data = {}, b""
    for name, (dtype, array) in arrays.items():
        raw = array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data must be aligned
    return struct.pack("<Q", len(text)) + text + data


def test_run_reads_safetensors_and_bf16(tmp_path, tensors):
    def bf16(x):  # truncated: exactly representable
        return (x.view(np.uint32) >> 16).astype(np.uint16)

    def widened(bits):
        return (bits.astype(np.uint32) << 16).view(np.float32)

    bits = [bf16(x) for x in tensors]
    file = tmp_path / "qkv.safetensors"
    file.write_bytes(safetensors_bytes(q=("BF16", bits[0]), k=("BF16", bits[1]), v=("BF16", bits[2])))
    said = run_json("run", "--tensors", file, "-o", tmp_path / "o.npy")
    assert said["dtype"] == "bfloat16"
    got = np.load(tmp_path / "o.npy")
    assert got.dtype == np.float32
    o, _ = softmax_attention(*map(widened, bits))
    np.testing.assert_allclose(got, o, rtol=0, atol=3e-2)
    run("run", "--tensors", file, "--dtype", "f32", "-o", tmp_path / "wide.npy")
    np.testing.assert_allclose(np.load(tmp_path / "wide.npy"), o, rtol=0, atol=2e-6)


def test_run_says_what_is_wrong_and_writes_nothing(tmp_path, tensors):
    q, k, v = tensors
    flags = save(tmp_path, q=q, k=k[:, :, :1].repeat(3, axis=2), v=v[:, :, :1].repeat(3, axis=2))
    text = run("run", *flags, "-o", tmp_path / "o.npy", code=2)
    assert "k has 3 heads and q has 4" in text
    assert "v is missing" in run("run", *flags[:4], "-o", tmp_path / "o.npy", code=2)
    assert "'nonesuch'" in run("run", *save(tmp_path, q=q, k=k, v=v), "--method", "nonesuch", "-o", tmp_path / "o.npy",
                               code=2)  # fmt: skip
    assert "cannot open" in run("run", "--q", tmp_path / "absent.npy", "-o", tmp_path / "o.npy", code=3)
    assert "given twice" in run(
        "run", *save(tmp_path, q=q, k=k, v=v), "-o", tmp_path / "o.npy", "--tensors", write_qkv(tmp_path, q), code=2
    )
    assert "cannot write" in run("run", *save(tmp_path, q=q, k=k, v=v), "-o", tmp_path / "no" / "o.npy", code=3)
    assert {path.name for path in tmp_path.iterdir()} == {"q.npy", "k.npy", "v.npy", "q.safetensors"}


def test_run_keeps_its_inputs(tmp_path, tensors):
    flags = save(tmp_path, **dict(zip("qkv", tensors)))
    before = (tmp_path / "q.npy").read_bytes()
    (tmp_path / "link.npy").symlink_to("q.npy")
    os.link(tmp_path / "q.npy", tmp_path / "hard.npy")
    for name in ("q.npy", "link.npy", "hard.npy", "../" + tmp_path.name + "/q.npy"):
        said = run("run", *flags, "-o", tmp_path / name, code=2)
        assert f"--out is {tmp_path / name}, the file that --q is read from" in said
    assert "--lse is" in run("run", *flags, "-o", tmp_path / "o.npy", "--lse", tmp_path / "v.npy", code=2)
    assert "the file that --out names" in run("run", *flags, "-o", tmp_path / "o.npy", "--lse", tmp_path / "o.npy", code=2)
    file = write_qkv(tmp_path, tensors[0])
    assert "--tensors" in run("run", "--tensors", file, *flags[2:], "-o", file, code=2)
    assert (tmp_path / "q.npy").read_bytes() == before and not (tmp_path / "o.npy").exists()


def test_run_writes_through_links_devices_and_pipes(tmp_path, tensors):
    flags = save(tmp_path, **dict(zip("qkv", tensors)))
    o, _ = softmax_attention(*tensors)
    (tmp_path / "inner").mkdir()
    (tmp_path / "link.npy").symlink_to("inner/o.npy")
    (tmp_path / "precious").write_text("precious")
    for name in ("link.npy.part", "inner/o.npy.part"):  # no name is written that others can have put there
        (tmp_path / name).symlink_to(tmp_path / "precious")
    for _ in range(2):  # a new file, and one that is replaced
        run("run", *flags, "-o", tmp_path / "link.npy", "--lse", tmp_path / "lse.npy")
    assert (tmp_path / "link.npy").is_symlink() and (tmp_path / "precious").read_text() == "precious"
    np.testing.assert_allclose(np.load(tmp_path / "inner" / "o.npy"), o, rtol=0, atol=2e-6)
    for device, code in (("null", 0), ("full", 3)):  # by links, so that a mistake here would not cost the machine's own
        (tmp_path / device).symlink_to(f"/dev/{device}")
        run("run", *flags, "-o", tmp_path / device, code=code)
        assert (tmp_path / device).is_symlink() and stat.S_ISCHR(os.stat(tmp_path / device).st_mode)
    piped = subprocess.run(
        [CLI, "run", *map(str, flags), "-o", "/dev/fd/2"], capture_output=True, timeout=300, check=True)  # fmt: skip
    np.testing.assert_allclose(np.load(io.BytesIO(piped.stderr)), o, rtol=0, atol=2e-6)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".heddle-")]


def write_qkv(folder, q):
    file = folder / "q.safetensors"
    file.write_bytes(safetensors_bytes(q=("F32", q)))
    return file


def npy(header, data=b"", version=b"\x01\x00", length=None):
    length = len(header) if length is None else length
    return b"\x93NUMPY" + version + struct.pack("<H", length) + header + data


HOSTILE = {
    "empty": (b"", "magic"),
    "not npy": (b"PK\x03\x04" + bytes(100), "magic"),
    "version 9": (npy(b"{}", version=b"\x09\x00"), "version 9.0"),
    "truncated header": (npy(b"{'descr': '<f4'", length=400), "ends inside its header"),
    "huge header": (
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 0xFFFFFFF0) + b"{}", "its header claims 4294967280 bytes"),
    "pickle": (npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", bytes(8)), "'|O'"),
    "big endian": (npy(b"{'descr': '>f4', 'fortran_order': False, 'shape': (1,), }", bytes(4)), "holds big-endian float32:"),
    "float64": (
        npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", bytes(8)),
        "holds float64: float32, float16, int32 or bool is wanted"),
    "missing key": (npy(b"{'descr': '<f4', 'shape': (1,), }", bytes(4)), "missing"),
    "repeated key": (npy(b"{'descr': '<f4', 'descr': '<f4', 'shape': (1,), }", bytes(4)), "repeated"),
    "code": (npy(b"__import__('os').system('true')"), "'{' is missing"),
    "text behind": (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), } + 1", bytes(4)), "text follows"),
    "overflowing extent": (
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }"), "63 bits"),
    "overflowing product": (
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }"), "63 bits"),
    "negative extent": (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }"), "not a number"),
    "five dimensions": (
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1, 1, 1), }", bytes(4)), "5 dimensions"),
    "no dimension": (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (), }", bytes(4)), "0 dimensions"),
    "too little data": (
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 4), }", bytes(4)),
        "needs 16000000000 bytes of data and it holds 4"),
    "too much data": (
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", bytes(5)), "and it holds 5"),
    "bool of 2": (npy(b"{'descr': '|b1', 'fortran_order': False, 'shape': (2,), }", b"\x01\x02"), "the bool 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_npy_files_are_refused(tmp_path, name):
    content, sentence = HOSTILE[name]
    file = tmp_path / "q.npy"
    file.write_bytes(content)
    text = run("run", "--q", file, "-o", tmp_path / "o.npy", code=2)
    assert str(file) in text and sentence in text


def test_folders_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # which nobody writes
    for path in (tmp_path, "/dev/zero", tmp_path / "pipe"):
        for flag in ("--q", "--tensors"):
            assert f"{path} is not a regular file" in run("run", flag, path, "-o", tmp_path / "o.npy", code=3)


def test_truncated_safetensors_are_refused(tmp_path, tensors):
    whole = safetensors_bytes(q=("F32", tensors[0]))
    file = tmp_path / "q.safetensors"
    for size in (0, 7, 20, len(whole) - 1):
        file.write_bytes(whole[:size])
        run("run", "--tensors", file, "-o", tmp_path / "o.npy", code=2)


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


def built_with_cases():
    return subprocess.run([CLI, "check", "--list"], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [*([verb, "--device", "cuda"] for verb in ("explain", "memory", "bench")), ["run", "--device", "cuda", "-o", "o.npy"],
     ["tune"], ["tune", "--json", "--out", "tuned.json"]],
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
    assert {"sm80 d64", "sm80 f32", "sm80_bwd d64", "sm80_bwd f32"} <= {row["kernel"] for row in rows if "seconds" in row}
    said = run_json("info", HEDDLE_TUNING=str(file))["gpu"]["tuning"]
    assert said.startswith(f"{file}: used, made on {gpu['name']} ")
    moved = json.loads(file.read_text())
    moved["gpu"]["multiprocessors"] += 1
    file.write_text(json.dumps(moved))
    assert f"{file}: ignored, " in run_json("info", HEDDLE_TUNING=str(file))["gpu"]["tuning"]
    file.write_text("{}")
    assert "'schema' is missing" in run("explain", "--device", "cuda", "--dtype", "bf16", code=2, HEDDLE_TUNING=str(file))


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


def test_check_refuses_an_empty_choice():
    if built_with_cases():
        assert "no case of the table is left" in run("check", "--name", "nonesuch", code=2)
        assert "none of the chosen cases has a candidate" in run("check", "--name", "s64_d64_f32", "--candidate", "x",
                                                                 code=2)  # fmt: skip
