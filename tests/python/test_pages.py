"""The pages hold: Python blocks run one after the other and print what the comments behind `print(...)` say; quoted errors are raised."""

import contextlib
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/start.md",
        "docs/kv_cache.md",
        "docs/nn.md",
        "docs/partial.md",
        "docs/serving.md",
        "docs/sparse.md",
        "docs/patterns.md",
        "docs/adaptive.md",
        "docs/nsa.md",
        "docs/asam.md",
    ],
)
def test_the_blocks_of_a_page_print_what_it_says(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert blocks, "the page has no Python"
    names: dict = {}
    for block in blocks:
        if "transformers" in block:
            pytest.importorskip("transformers")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, page, "exec"), names)
        assert PRINTED.findall(block), "a block shows nothing"
        assert printed.getvalue().splitlines() == PRINTED.findall(block)


def test_the_commands_of_ranks_in_cpp_run():
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"^```\n(apt .*?)^```", page, re.MULTILINE | re.DOTALL)
    programs = re.findall(r"^mpiexec .* (build/release/examples/\w+)", commands, re.MULTILINE)
    built = re.search(r"--target (.*)$", commands, re.MULTILINE)
    assert built
    assert [Path(program).name for program in programs] == built[1].split()
    if shutil.which("mpiexec") is None or not all((ROOT / program).exists() for program in programs):
        pytest.skip("there is no MPI, or the programs were not built")
    own = "\n".join(line for line in commands.splitlines() if line.startswith(("export", "mpiexec")))
    said = subprocess.run(["bash", "-ec", own], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert len(re.findall(r"^2 ranks, .* the farthest from one process$", said.stdout, re.MULTILINE)) == len(programs)


def refusals():
    """What docs/troubleshooting.md quotes -> a call that says it."""
    import heddle
    import heddle.nn
    from heddle import lowbit

    q = torch.zeros(2, 128, 8, 64)
    k = v = torch.zeros(2, 128, 2, 64)
    wanting = q.clone().requires_grad_()
    caches = torch.zeros(2, 16, 2, 64), torch.zeros(2, 16, 2, 64)
    call = heddle.attention

    def cached(seqlens, q=q):
        return heddle.attention_with_kv_cache(q[:, :1], k[:, :1], v[:, :1], *caches, seqlens)

    def twice():
        first = torch.autograd.grad(call(wanting, k, v).sum(), wanting, create_graph=True)[0]
        torch.autograd.grad(first.sum(), wanting)

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32)

    wide = torch.zeros(1, 8, 2, 320)
    starts = dict(cu_seqlens_q=ints(1, 128), cu_seqlens_k=ints(0, 128))
    padded = dict(cache_leftpad=ints(0, 0))
    quantized = lowbit.quantize(torch.ones(64, 64), "nvfp4")
    return {
        "causal is True: say which corner the diagonal starts from": lambda: call(q, k, v, causal=True),
        "mask is float32: it must be bool": lambda: call(q, k, v, mask=torch.zeros(2, 1, 128, 128)),
        "q has head size 320: it must be from 1 to 256": lambda: call(wide, wide, wide),
        "q is float64: it must be float32, float16 or bfloat16": lambda: call(q.double(), k.double(), v.double()),
        "k is float16: it must be float32": lambda: call(q, k.half(), v),
        "q's heads must be a multiple of k's": lambda: call(q[:, :, :3], k, v),
        "k is on another device than q": lambda: call(q, k.to("meta"), v),
        "no candidate can serve this call": lambda: call(q, k, v, precision="int8_qk"),
        "which cannot serve this call": lambda: call(q, k, v, force="sm90"),
        "q requires a gradient: this call has no backward": lambda: cached(ints(0, 0), wanting),
        "cache_leftpad has no backward: gather the keys first": lambda: call(wanting, k, v, **padded).sum().backward(),
        "second derivatives are not supported": twice,
        "alibi_slopes requires a gradient: it has none": lambda: call(
            wanting, k, v, alibi_slopes=torch.ones(8, requires_grad=True)
        ),
        "cu_seqlens_q[0] is 1: it must be 0": lambda: call(q[0], k[0], v[0], **starts),
        "seqlens is int64: it must be int32": lambda: cached(torch.tensor([0, 0])),
        "and the cache's rows hold 16": lambda: cached(ints(15, 16)),
        "page_table[0, 0] is 9: it must be from 0 to 1": lambda: call(q, k, v, page_table=ints(9, 9).reshape(2, 1)),
        "out shares memory with q": lambda: call(q, k, v, out=q),
        "weights is a QuantizedTensor: pack it first": lambda: lowbit.linear(torch.ones(1, 64), quantized),
        "K is 65: nvfp4 needs a multiple of its group, 16": lambda: lowbit.quantize(torch.ones(64, 65), "nvfp4"),
        "format is 'nvfp5': it must be one of": lambda: lowbit.quantize(torch.ones(64, 64), "nvfp5"),
        "pattern 'q_porj' matches no layer": lambda: heddle.nn.quantize_model(
            torch.nn.Sequential(torch.nn.Linear(64, 64)), {"q_porj": "nvfp4"}
        ),
        "names of a hub are not downloaded": lambda: lowbit.load("org/model", "layer"),
    }


def test_errors_are_as_the_page_quotes_them():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    sections = page[page.index("## Attention") : page.index("## Settings")]
    by_environment = {"which no operation has; here the candidates are"}  # HEDDLE_KERNEL: tests/kernels/choice_test.cc
    calls = refusals()
    assert set(re.findall(r"^\| `([^`]+)` \|", sections, re.MULTILINE)) == set(calls) | by_environment
    for words, call in calls.items():
        with pytest.raises((ValueError, TypeError, RuntimeError, FileNotFoundError), match=re.escape(words)):
            call()


def test_the_citation_has_the_version_that_is_built():
    built = re.search(r"project\(heddle VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [built]
