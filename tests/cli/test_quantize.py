"""heddle quantize as its users call it."""

import json
import os
import signal
import struct
import subprocess

import numpy as np
import pytest
from command import CLI, needs_command, run, run_json

pytestmark = needs_command


def write_safetensors(path, **tensors):
    """float32 arrays; names with dots as they are in a dict."""
    header, data = {}, b""
    for name, array in tensors.items():
        array = array.astype("<f4")
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def checkpoint(tmp_path):
    random = np.random.default_rng(5)
    layers = {
        f"model.layers.0.mlp.{part}_proj.weight": random.standard_normal((48, 128)) for part in ("gate", "up", "down")
    }
    write_safetensors(tmp_path / "model.safetensors", **layers, **{"lm_head.weight": random.standard_normal((9, 128))})
    return tmp_path / "model.safetensors"


def test_quantize_writes_a_folder_and_says_what_it_costs(checkpoint):
    text = run("quantize", checkpoint)
    assert "3 layers changed, 1 2-D weights kept" in text and "nvfp4:mse" in text and "48 x 128" in text
    folder = checkpoint.parent / "model-nvfp4"
    assert {p.name for p in folder.iterdir()} == {"model.safetensors", "config.json"}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == "nvfp4-pack-quantized" and config["ignore"] == ["lm_head"]


def test_quantize_lists_experts_that_lie_in_one_tensor(tmp_path):
    layers = {"model.layers.0.mlp.up.weight": np.ones((16, 32)), "model.layers.0.experts.down": np.ones((4, 8, 32))}
    write_safetensors(tmp_path / "m.safetensors", **layers)
    text = run("quantize", tmp_path / "m.safetensors")
    assert "model.layers.0.experts.down" in text and "4 x 8 x 32" in text and "1 3-D tensors are as they were" in text
    found = run_json("quantize", "-o", tmp_path / "out", tmp_path / "m.safetensors")["copied_3d"]
    assert found == [
        {"name": "model.layers.0.experts.down", "file": "m.safetensors", "shape": [4, 8, 32], "bytes": 4096}
    ]


def test_quantize_json_and_rules(checkpoint):
    out = checkpoint.parent / "out"
    found = run_json("quantize", "-o", out, "--format", "int8_row", "--rule", "plain", "--layers", "*up_proj=int4_g64:mse",
                     "--layers", "*gate*=16bit", "--keep", "*down*", checkpoint)  # fmt: skip
    assert found["output"] == str(out) and found["kept"] == [
        "lm_head",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.mlp.gate_proj",
    ]
    by_name = {layer["name"].split(".")[-1]: layer for layer in found["layers"]}
    assert {name: (layer["format"], layer["rule"]) for name, layer in by_name.items()} == {
        "gate_proj": ("bfloat16", ""),
        "up_proj": ("int4_g64", "mse"),
    }
    assert (
        by_name["up_proj"]["bytes_after"] == 48 * 64 + 48 * 2 * 2 + 16
        and by_name["up_proj"]["bytes_before"] == 48 * 128 * 4
    )
    assert 15 < by_name["up_proj"]["sqnr_db"] < 25 < by_name["gate_proj"]["sqnr_db"]


def test_quantize_says_what_hugging_face_s_loading_wants(checkpoint):
    """And says nothing where it holds."""
    folder = checkpoint.parent / "in"
    folder.mkdir()
    checkpoint.rename(folder / "model.safetensors")
    for dtype, format, wanted in [
        ("float32", "nvfp4", ["nvfp4: decoded to bfloat16 whatever the model is in, which is float32: load with dtype=torch.bfloat16"]),
        (None, "mxfp4", ["which is not said"]), ("bfloat16", "nvfp4", []), ("float32", "int8_row", []),
        ("bfloat16", "int4_g32_zp", ["int4_g32_zp: from_pretrained refuses its zero points"]),
    ]:  # fmt: skip
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | ({"dtype": dtype} if dtype else {})))
        found = run_json("quantize", folder, "--format", format, "-o", folder.parent / f"json-{dtype}-{format}")
        assert len(found["loading_limits"]) == len(wanted)
        text = run("quantize", folder, "--format", format, "-o", folder.parent / f"text-{dtype}-{format}")
        closing = text[text.index("written to ") :].splitlines()[1:]
        assert closing == found["loading_limits"] and all(a in b for a, b in zip(wanted, closing))


def test_quantize_prints_a_line_for_each_layer(checkpoint):
    done = subprocess.run([CLI, "quantize", checkpoint, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)
    assert [line.split("] ")[1] for line in done.stderr.splitlines()] == [
        f"model.layers.0.mlp.{part}_proj.weight: nvfp4" for part in ("down", "gate", "up")
    ]


def test_quantize_draws_a_bar_on_a_terminal(checkpoint):
    pty = pytest.importorskip("pty")
    leader, follower = pty.openpty()
    done = subprocess.run([CLI, "quantize", checkpoint], stdout=subprocess.DEVNULL, stderr=follower, timeout=300)
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert done.returncode == 0 and "\r" in shown and "100 %" in shown and shown.endswith("\n")


def test_quantize_takes_importance(checkpoint):
    folder = checkpoint.parent / "importance"
    folder.mkdir()
    name = "model.layers.0.mlp.up_proj"
    np.save(folder / f"{name}.npy", np.linspace(0, 1, 128, dtype=np.float32))
    options = ("quantize", checkpoint, "--format", "int4_g32", "--importance", folder)
    error = {layer["name"]: layer["sqnr_db"] for layer in run_json(*options, "-o", checkpoint.parent / "a")["layers"]}
    plain = {
        layer["name"]: layer["sqnr_db"] for layer in run_json(*options[:4], "-o", checkpoint.parent / "b")["layers"]
    }
    assert error[name] < plain.pop(name) and all(error[other] == plain[other] for other in plain)
    np.save(folder / f"{name}.npy", np.ones(3, np.float32))
    assert "up_proj.weight': importance" in run(*options, "-o", checkpoint.parent / "c", code=2)


def test_quantize_refuses_importance_of_nothing(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("importance")
    options = ("quantize", checkpoint, "--importance", folder)
    assert f"--importance is {folder}: it holds no LAYER.npy" in run(*options, code=2)
    np.save(folder / "model.layers.0.mlp.up_porj.npy", np.ones(128, np.float32))
    said = run(*options, code=2)
    assert (
        "none of its 1 files is of a layer of" in said
        and "'model.layers.0.mlp.up_porj.npy'" in said
        and "mlp.up_proj'" in said
    )
    np.save(folder / "model.layers.0.mlp.up_proj.npy", np.ones(128, np.float32))
    done = subprocess.run([CLI, *map(str, options)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "1 of the 2 files of --importance are of no layer of this checkpoint" in done.stderr
    absent = folder / "absent"
    assert f"--importance is {absent}: there is no such folder" in run(
        "quantize", checkpoint, "--importance", absent, code=2
    )


def test_quantize_reads_no_importance_outside_of_its_folder(tmp_path):
    """Whatever names the tensors have."""
    folder, elsewhere = tmp_path / "importance", tmp_path / "elsewhere.0.up"
    folder.mkdir()
    names = [str(elsewhere), "../elsewhere.0.up", "layers.0.up"]
    write_safetensors(tmp_path / "m.safetensors", **{f"{name}.weight": np.ones((4, 32)) for name in names})
    np.save(f"{elsewhere}.npy", np.ones(3, np.float32))  # refused if it is read
    np.save(folder / "layers.0.up.npy", np.ones(32, np.float32))
    found = run_json("quantize", tmp_path / "m.safetensors", "--importance", folder, "-o", tmp_path / "out")
    assert sorted(layer["name"] for layer in found["layers"]) == sorted(names)


@pytest.mark.parametrize("content", [b'{\n  "model_type": "llama"\n}', b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', "])
def test_quantize_says_what_is_no_safetensors_file(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert f"{tmp_path / 'file'}: not a safetensors file: its first 8 bytes" in run(
        "quantize", tmp_path / "file", code=2
    )


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (("--format", "nf4", "--rule", "four_six"), 2, "down_proj.weight': rule is four_six, which nf4 does not have"),
        (("--format", "fp3"), 2, "format is 'fp3': it must be one of nvfp4"),
        (("--rule", "best"), 2, "best"),
        (("--format", "nf4_b256"), 2, "K = 128 is no multiple of 256"),
        (("--layers", "up_proj"), 2, "write PATTERN=FORMAT"),
        (("--keep", "nothing"), 2, "pattern 'nothing' decides over no layer"),
        (("-o", "no/such/folder"), 3, "cannot make the folder no/such/folder.partial"),
    ],
)
def test_quantize_refuses(checkpoint, arguments, code, message):
    said = run("quantize", checkpoint, *arguments, code=code)
    assert message in said and "[1/" not in said  # before the first layer
    assert [p.name for p in checkpoint.parent.iterdir()] == ["model.safetensors"]


def test_quantize_leaves_nothing_of_a_disk_that_is_full(checkpoint):
    resource = pytest.importorskip("resource")
    done = subprocess.run(
        [CLI, "quantize", checkpoint],
        capture_output=True,
        text=True,
        timeout=300,
        restore_signals=False,  # SIGXFSZ stays ignored, so that writing fails instead
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert done.returncode == 3 and "model.safetensors: File too large" in done.stderr
    assert [p.name for p in checkpoint.parent.iterdir()] == ["model.safetensors"]


def test_quantize_leaves_nothing_when_it_is_interrupted(tmp_path):
    random = np.random.default_rng(5)
    weights = random.standard_normal((512, 1024))
    write_safetensors(tmp_path / "model.safetensors", **{f"h.{i}.fc1.weight": weights for i in range(24)})
    process = subprocess.Popen(
        [CLI, "quantize", tmp_path / "model.safetensors", "--format", "nf4", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "[1/24]" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=300)
    assert process.returncode == 3 and "interrupted" in rest
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_quantize_leaves_nothing_when_nobody_reads_on(tmp_path):
    """As of `heddle quantize ... 2>&1 | head -1`."""
    random = np.random.default_rng(5)
    weights = random.standard_normal((512, 1024))
    write_safetensors(tmp_path / "model.safetensors", **{f"h.{i}.fc1.weight": weights for i in range(24)})
    process = subprocess.Popen(
        [CLI, "quantize", tmp_path / "model.safetensors", "--format", "nf4", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "[1/24]" in process.stderr.readline()
    process.stderr.close()
    process.stdout.close()
    assert process.wait(timeout=300) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
