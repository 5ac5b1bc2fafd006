"""heddle check: every case table, digests, and choices that are empty."""

from command import built_with_cases, needs_command, run, run_json

pytestmark = needs_command


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
    few = [
        "--operation",
        "all",
        "--name",
        "s64_d64_f32",
        "merge_sink",
        "sparse_sink",
        "adaptive_sink",
        "linear_nvfp4_m8_",
    ]
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
    assert found["adaptive_attention", "adaptive_sink", "forward"] == ["lse", "o"]
    assert found["adaptive_attention", "adaptive_sink", "backward"] == ["dk", "dq", "dsink", "dv"]
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
    assert list(by_operation) == ["attention", "merge_attention", "sparse_attention", "adaptive_attention", "linear"]
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
        asked = ["check", "--name", "s64_d64_f32", "--candidate"]
        assert "none of the chosen cases has a candidate" in run(*asked, "naive_cuda", code=2)
        assert "--candidate is 'x': it must be one of cpu, " in run(*asked, "x", code=2)
