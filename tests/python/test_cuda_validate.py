"""HEDDLE_VALIDATE on a GPU: each test is a process of its own, since the environment is read once."""

import os
import subprocess
import sys

import pytest
import torch
from heddle import _heddle

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

PREAMBLE = """
import pytest, torch, heddle
q, k = torch.randn(6, 2, 64, device="cuda", dtype=torch.float16), torch.randn(8, 1, 64, device="cuda", dtype=torch.float16)

def offsets(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")

def attend(at=(0, 3, 6), **tensors):
    tensors = {"q": q, "k": k, **tensors}
    return heddle.attention(tensors["q"], tensors["k"], tensors["k"], cu_seqlens_q=offsets(*at),
                            cu_seqlens_k=offsets(0, 4, 8), max_seqlen_q=3, max_seqlen_k=4)

WRONG = r"\\[attention_forward\\] cu_seqlens_q ends at 5: it must end at q's first extent, 6"
"""


def run(code, validate="1"):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HEDDLE_VALIDATE": validate}
    done = subprocess.run([sys.executable, "-c", PREAMBLE + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_check_errors_raises_once():
    run("""
attend()
heddle.check_errors()
attend((0, 3, 5))
with pytest.raises(ValueError, match=WRONG):
    heddle.check_errors()
heddle.check_errors("cuda:0")
attend()
heddle.check_errors()
""")


def test_next_call_on_the_stream_raises_without_a_wait():
    run("""
other = torch.cuda.Stream()
attend((0, 3, 5))
torch.cuda.synchronize()
with torch.cuda.stream(other):
    attend()
with pytest.raises(ValueError, match=WRONG):
    attend()
attend()
heddle.check_errors()
""")


def test_all_streams_are_told():
    run("""
other = torch.cuda.Stream()
attend((0, 3, 5))
with torch.cuda.stream(other):
    attend((1, 3, 6))
with pytest.raises(ValueError) as raised:
    heddle.check_errors()
lines = str(raised.value).splitlines()
assert len(lines) == 2 and "ends at 5" in lines[0] and "cu_seqlens_q[0] is 1: it must be 0" in lines[1], lines
""")


def test_gradients_and_captures():
    run("""
at = offsets(0, 3, 6)
x = q.clone().requires_grad_()
def call():
    return heddle.attention(x, k, k, cu_seqlens_q=at, cu_seqlens_k=offsets_k, max_seqlen_q=3, max_seqlen_k=4)
offsets_k = offsets(0, 4, 8)
out = call()
torch.cuda.synchronize()
at.data[2] = 5
out.sum().backward()
with pytest.raises(ValueError, match=r"\\[attention_backward\\] cu_seqlens_q ends at 5"):
    heddle.check_errors()

at.data[2] = 6
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    call()
graph.replay()
heddle.check_errors()
at.data[2] = 5
graph.replay()
with pytest.raises(ValueError, match=WRONG):
    heddle.check_errors()
""")


def test_off_finds_nothing():
    run(
        """
attend((0, 3, 5))
heddle.check_errors()
""",
        validate="0",
    )
