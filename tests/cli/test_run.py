"""heddle run as its users call it: files in and out, and files that are refused."""

import io
import json
import os
import stat
import struct
import subprocess

import numpy as np
import pytest
from command import CLI, needs_command, run, run_json, save, softmax_attention

pytestmark = needs_command


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
    assert "the file that --out names" in run(
        "run", *flags, "-o", tmp_path / "o.npy", "--lse", tmp_path / "o.npy", code=2
    )
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
