"""heddle explain: which candidate each operation gets, here and on GPUs that are not here, and why."""

import json
import pathlib
import re

import pytest
from command import WITHOUT_CUDA, needs_command, run, run_json

pytestmark = needs_command


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
    assert "q_step is 0: it must be from 1 to 2147483647" in run("explain", "--q-step", 0, code=2)
    stepped = run_json("explain", "--key-step", 16, "--causal", "top_left")
    assert stepped["problem"]["key_step"] == 16 and [c["name"] for c in stepped["candidates"] if c["chosen"]] == ["cpu"]
    assert "mask is given and key_step is 16" in run("explain", "--key-step", 16, "--mask", code=2)


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


def tuning_file(kernels):
    made = {"name": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0", "multiprocessors": 132}
    return json.dumps({"schema": 1, "gpu": made, "version": run_json("info")["version"], "kernels": kernels})


def test_a_tuning_file_is_for_the_gpu_it_was_made_on(tmp_path):
    if WITHOUT_CUDA in run("explain"):
        pytest.skip("no kernels to tune")
    file = tmp_path / "tuned.json"
    file.write_text(tuning_file({"sm90 d64": {"fixed": 0.25, "flops": 1e15}}))
    tuned = dict(HEDDLE_TUNING=str(file))
    assert chosen_on("h200", **tuned) == chosen_on("h200")
    assert chosen_on("h100", "--force", "sm90", **tuned)[1]["estimated_seconds"] > 0.25
    assert chosen_on("h100", **tuned)[1]["name"] == "sm80" and chosen_on("h100")[1]["name"] == "sm90"


@pytest.mark.parametrize("way, query_rows", [("blocks", 1), ("rows", 64)])
def test_a_tuning_file_decides_over_lists(tmp_path, way, query_rows):
    if WITHOUT_CUDA in run("explain"):
        pytest.skip("no kernels to tune")
    file = tmp_path / "tuned.json"
    file.write_text(tuning_file({f"sm90_sparse by {way}": {"bytes": 1e9}}))
    flags = ["sparse", "--gpu", "h100", "--dtype", "bf16", "--query-rows", query_rows]
    before, after = (run_json("explain", *flags, **tuned) for tuned in ({}, {"HEDDLE_TUNING": str(file)}))
    assert [c["name"] for c in before["candidates"] if c["chosen"]] == ["sm90"]
    chosen = [c for c in after["candidates"] if c["chosen"]]
    assert [c["name"] for c in chosen] == ["sm80"] and f"by {way}" in chosen[0]["plan"]


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
    assert run_json("explain", verb, *flags, "--force", "naive_cuda")["candidates"][0]["chosen"] is False

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
    there = run_json("explain", "sparse", "--gpu", "h100", "--dtype", "bfloat16", *flags)
    assert there["assumed"]
    on_gpus = [c for c in there["candidates"] if c["name"] == ("sm90" if direction == "forward" else "sm80")]
    if run_json("info")["gpu"]["kernels"]:
        assert on_gpus[0]["chosen"] and on_gpus[0]["plan"]
    else:
        assert not any(c["chosen"] for c in there["candidates"])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_explain_adaptive(direction):
    flags = ["--length", 300, "--heads", 4, "--kv-heads", 2, "--tol", 0.25, "--causal", "top_left", "--pass", direction]
    out = run_json("explain", "adaptive", *flags)
    assert [c["name"] for c in out["candidates"] if c["chosen"]] == ["cpu"]
    assert out["tol"] == 0.25 and out["pass"] == direction and out["problem"]["dtype"] == "float32"
    assert "tol 0.25, " + direction in run("explain", "adaptive", *flags)
    assert "runs on the CPU" in run("explain", "adaptive", *flags, "--gpu", "h100", code=2)
    forced = run_json("explain", "adaptive", *flags, "--force", "reference")["candidates"]
    assert [c["name"] for c in forced if c["chosen"]] == ["reference"]


@pytest.mark.parametrize(
    "flags",
    [
        ["pool", "--keys", 300, "--block", 32, "--stride", 16],
        ["pool", "--keys", 300, "--pass", "backward"],
        ["pool", "--keys", 40],
        ["select", "--heads", 6, "--length", 300],
        ["select", "--length", 3, "--keys", 700, "--block", 32, "--stride", 16, "--without-lse"],
    ],
)
def test_explain_native_sparse_attention(flags):
    out = run_json("explain", *flags)
    assert [c["name"] for c in out["candidates"] if c["chosen"]] == ["cpu"]
    assert out["candidates"][0]["plan"]
    if flags[0] == "select":
        blocks = (flags[4] - 64) // 64 + 1 if "--keys" not in flags else (700 - 32) // 16 + 1
        assert out["problem"]["pooled_keys"] == blocks and f"by {blocks} pooled keys" in run("explain", *flags)
    there = run_json("explain", *flags, "--gpu", "h100")
    assert there["assumed"] and there["problem"]["dtype"] == "bfloat16"
    forced = run_json("explain", *flags, "--force", "reference")["candidates"]
    assert [c["name"] for c in forced if c["chosen"]] == ["reference"]


def test_explain_a_step_of_native_sparse_attention():
    rest = ["step", "--batch", 2, "--kv-heads", 4, "--head-size", 128, "--window", 512]
    flags = [*rest, "--heads", 64]
    out = run_json("explain", *flags, "--v-head-size", 64, "--without-compressed", "--gpu", "h100")
    problem = out["problem"]
    assert problem["dtype"] == "bfloat16" and problem["v_head_size"] == 64 and not problem["compressed"]
    assert "a step of q [2, 1, 64, 128] over caches of 65536 keys" in run("explain", *flags)
    assert [c["name"] for c in run_json("explain", *flags)["candidates"] if c["chosen"]] == []
    if run_json("info")["gpu"]["kernels"]:
        assert [c["name"] for c in out["candidates"] if c["chosen"]] == ["sm90"] and out["candidates"][0]["plan"]
        for gpu, call, reason in [
            ("a100", flags, "it needs a Hopper GPU"),
            ("h100", [*flags, "--entries", 33], "it lists no more than 32 blocks, not 33"),
            ("h100", [*rest, "--heads", 68], "it has no more than 16 query heads to a key/value head, not 17"),
        ]:
            candidates = run_json("explain", *call, "--gpu", gpu)["candidates"]
            assert not any(c["chosen"] for c in candidates) and reason in candidates[0]["reason"]
    assert "q is float32: a step takes float16 or bfloat16" in run("explain", "step", "--dtype", "f32", code=2)
    assert "--capacity is 0: it must be at least 1" in run("explain", "step", "--capacity", 0, code=2)


def test_explain_branches_joined_by_gates():
    flags = ["gate", "--heads", 6, "--length", 300]
    for of_pass in ("forward", "backward"):
        here = run_json("explain", *flags, "--pass", of_pass)
        assert [c["name"] for c in here["candidates"] if c["chosen"]] == []  # torch's operations join them there
        there = run_json("explain", *flags, "--pass", of_pass, "--gpu", "a100")
        assert there["assumed"] and there["problem"]["dtype"] == "bfloat16" and there["pass"] == of_pass
        if run_json("info")["gpu"]["kernels"]:
            assert [c["name"] for c in there["candidates"] if c["chosen"]] == ["cuda"]
    forced = run_json("explain", *flags, "--force", "reference")["candidates"]
    assert [c["name"] for c in forced if c["chosen"]] == ["reference"]
    assert "there are 4 branches: there must be 1 to 3" in run("explain", "gate", "--branches", 4, code=2)


def test_explain_names_every_operation():
    usage = run("explain", "--help")
    names = "sparse adaptive pool select gate step merge linear rotary append append-int4 attention-int4 quantize dequantize unpack"
    for verb in names.split():
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
    assert "tol is 0: it must be" in run("explain", "adaptive", "--tol", 0, code=2)
    assert "--keys is 0: it must be at least 1" in run("explain", "pool", "--keys", 0, code=2)
    assert "block is 32: it must be from stride, 40," in run("explain", "pool", "--block", 32, "--stride", 40, code=2)
    assert "block_size is 48" in run("explain", "select", "--block-size", 48, code=2)
    assert "--parts is 0: it must be at least 1" in run("explain", "merge", "--parts", 0, code=2)
    assert "has head size 257: it must be from 1 to 256" in run("explain", "merge", "--head-size", 257, code=2)
    assert "--pass" in run("explain", "merge", "--pass", "both", code=2)
    assert "order dense is for GPUs" in run("explain", "linear", "--order", "dense", code=2)


@pytest.mark.parametrize("flags", [["--packed"], ["--page-size", 5], ["--bias", "--mask", "--alibi", "--sink"]])
def test_explain_with_features(flags):
    out = run_json("explain", "--length", 65, *flags)
    assert sum(c["chosen"] for c in out["candidates"]) == 1


def test_the_page_has_what_explain_prints_of_a_plan():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    arguments, printed = re.search(
        r"^\$ heddle (explain --ranks .*?)\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    ).groups()
    assert run(*arguments.split()) == printed


def test_explain_a_plan_of_several_ranks():
    flags = ("--ranks", 4, "--length", 8192, "--heads", 32, "--kv-heads", 8, "--head-size", 128, "--dtype", "bf16")
    out = run_json("explain", *flags, "--causal", "top_left")
    plan = out["plan"]
    assert out["problem"]["ranks"] == 4 and plan["order"] == "zigzag" and plan["balance"] > 0.999
    assert [x["rows"] for x in plan["ranks"]] == [2048] * 4
    assert [x["begin"] for x in plan["ranks"][1]["runs"]] == [1024, 6144]
    ring = next(x for x in plan["schemes"] if x["name"] == "ring")
    assert ring["forward_bytes"] == 3 * 2048 * 8 * 256 * 2
    assert [x["name"] for x in plan["schemes"]] == ["gather", "ring", "needed", "ulysses", "2d"]
    assert plan["scheme"] in ("needed", "ring", "ulysses", "2d")
    heads, both = plan["schemes"][3:]
    assert heads["forward_bytes"] == 3 * 2048 * (8 * 256 * 2 + 2 * 512 + 8 * 4) and "ulysses" not in heads
    assert both["ulysses"] == 2 and both["across"] in ("needed", "ring")
    text = run("explain", *flags, "--causal", "top_left", "--link", 1e9)
    assert text.startswith(
        f"4 ranks, zigzag, B1 H32/8 S8192 D128 top_left, bfloat16: balance 1.000, plan {plan['digest']}"
    )
    assert "1 GB/s between ranks, 50.000 us an exchange" in text
    by_hosts = run("explain", *flags, "--causal", "top_left", "--ranks-per-host", 2, "--network", 2e9)
    assert "350 GB/s between ranks, 2 GB/s between hosts of 2, 50.000 us an exchange" in by_hosts
    assert f"2d, ulysses of 2 and {both['across']} " in text
    eight = run_json("explain", *flags[:1], 8, *flags[2:], "--ulysses", 4)["plan"]
    assert eight["schemes"][4]["ulysses"] == 4
    assert len(run_json("explain", *flags[:1], 3, *flags[2:])["plan"]["schemes"]) == 4  # 3 is a prime
    documents = run_json("explain", *flags, "--documents", 5000, 3000, 192, "--order", "balanced")["plan"]
    assert documents["balance"] > 0.9 and documents["digest"] != plan["digest"]


def test_explain_refuses_what_plans_do_not_know():
    assert "--bias is given beside --ranks: plans are of rows that are queries and keys at once" in run(
        "explain", "--ranks", 2, "--bias", code=2
    )
    assert "--keys is given beside --ranks" in run("explain", "--ranks", 2, "--keys", 7, code=2)
    assert "--documents is given without --ranks" in run("explain", "--documents", 1024, code=2)
    assert "--ulysses is given without --ranks" in run("explain", "--ulysses", 2, code=2)
    assert "--ranks-per-host is given without --ranks" in run("explain", "--ranks-per-host", 8, code=2)
    assert "[distributed.plan] ulysses is 3: it must divide the ranks, 4, or be 0" in run(
        "explain", "--ranks", 4, "--ulysses", 3, code=2
    )
    assert "[distributed.plan] cu_seqlens goes from 0 to 10: it must go from 0 to rows, 1024" in run(
        "explain", "--ranks", 2, "--documents", 10, code=2
    )
    assert "ranks is -1: it must be from 1 to 4096" in run("explain", "--ranks", -1, code=2)
    assert "order is 'zag': it must be one of contiguous, zigzag" in run(
        "explain", "--ranks", 2, "--order", "zag", code=2
    )
