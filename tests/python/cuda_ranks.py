"""Runs attention over GPUs, a process each, and writes what each case came to: what test_cuda_distributed.py asks. Where there is
one GPU two processes share it, and gloo carries copies of their tensors, as NCCL does not join two processes on one. With
HEDDLE_RANKS_DEVICE=cpu the same cases run on the CPU.

usage: cuda_ranks.py RESULTS.json
"""

import dataclasses
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from unittest import mock

if __name__ == "__main__":  # before the modules below read it; processes that are started from here inherit it
    os.environ.setdefault("HEDDLE_RANKS_DEVICE", "cuda")

import cuda_rank_programs
import decode_ranks
import distributed_ranks
import heddle
import heddle.distributed as hd
import heddle.nn
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from distributed_ranks import DEVICE, SECONDS, Case
from heddle.distributed import keys, peers
from heddle.distributed.ranks import Ranks
from ranks_kit import chunked_at_once

decode_module = sys.modules["heddle.distributed.decode"]  # its function has the module's name
BACKEND = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
WAIT = timedelta(seconds=SECONDS)
LOAD = int(os.environ.get("HEDDLE_RANKS_LOAD", "400" if DEVICE == "cuda" else "10"))  # calls


def cases():
    """Those of the CPU, and some of more than one tile."""
    wide = dict(heads=(8, 2), sizes=(128, 128), dtype=torch.bfloat16)
    ends = [0, 3, 130, 130, 700, 1150]
    return [
        *distributed_ranks.cases(),
        Case("bfloat16_causal", 1153, dict(causal="top_left"), **wide),
        Case("bfloat16_causal_batch", 700, dict(causal="top_left"), batch=2, **wide),
        Case("bfloat16_full", 517, dict(order="contiguous"), **wide),
        Case("half_window_sink", 900, dict(causal="top_left", window=(200, 0)), sink=True, **wide | dict(dtype=torch.float16)),
        Case("bfloat16_documents", 1150, dict(causal="top_left", cu_seqlens=ends, order="per_document"), packed=True, **wide),
        Case("bfloat16_documents_balanced", 1150, dict(causal="top_left", cu_seqlens=ends, order="balanced"), **wide),
        Case("bfloat16_alibi", 700, dict(causal="top_left"), alibi=True, **wide),
        Case("bfloat16_bias", 517, dict(causal="top_left"), bias=(1, 8), **wide),
        Case("bfloat16_striped", 640, dict(causal="top_left", order="striped"), **wide),
    ]  # fmt: skip


def operands(seed, rows, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    return [torch.randn(1, rows, heads, 64).to(DEVICE, dtype) for heads in (8, 2, 2)]


class Copied:
    """A receive into a copy, which wait() brings to the GPU."""

    def __init__(self, work, copy, into):
        self._work, self._copy, self._into = work, copy, into

    def is_completed(self):
        return True  # gloo's say so behind wait() alone

    def wait(self, *timeout):
        self._work.wait(*timeout)
        if self._into is not None:
            self._into.copy_(self._copy)


def copied_over_gloo(ops):
    out = []
    for op in ops:
        copy = op.tensor.cpu()
        into = op.tensor if op.op is dist.irecv and op.tensor.is_cuda else None
        out.append(Copied(op.op(copy if into is not None else op.tensor.cpu(), op.peer, op.group), copy, into))
    return out


def share_one_gpu():
    """From here on, in this process."""
    dist.batch_isend_irecv = copied_over_gloo
    Ranks.serve = lambda ranks, device: None


def check_without_waiting(rank, ranks):
    plan = hd.plan(1000, ranks, heads=8, kv_heads=2, head_size=64, causal="top_left")
    q, k, v = (hd.shard(x, plan, rank) for x in operands(1, 1000))
    for scheme in ("gather", "ring", "needed", "ulysses"):
        right = hd.attention(q, k, v, plan=plan, scheme=scheme, timeout=SECONDS)
        assert torch.equal(hd.attention(q, k, v, plan=plan, scheme=scheme), right), scheme


def check_in_a_graph(rank, ranks):
    """Bits are those of the call, with other rows in it, too."""
    plan = hd.plan(1000, ranks, heads=8, kv_heads=2, head_size=64, causal="top_left")
    for scheme in ("gather", "ring", "needed", "ulysses"):
        q, k, v = (hd.shard(x, plan, rank) for x in operands(1, 1000))
        hd.attention(q, k, v, plan=plan, scheme=scheme)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = hd.attention(q, k, v, plan=plan, scheme=scheme)
        for seed in (2, 1):
            for x, y in zip((q, k, v), operands(seed, 1000)):
                x.copy_(hd.shard(y, plan, rank))
            graph.replay()
            assert torch.equal(out, hd.attention(q, k, v, plan=plan, scheme=scheme)), (scheme, seed)


def check_gradients_in_a_graph(rank, ranks):
    """As check_in_a_graph, of a backward, whose call waits for the forward of its own."""
    plan = hd.plan(1000, ranks, heads=8, kv_heads=2, head_size=64, causal="top_left")
    for scheme in ("gather", "ring", "needed", "ulysses"):
        leaves = [hd.shard(x, plan, rank).requires_grad_() for x in operands(1, 1000)]

        def call(leaves=leaves, scheme=scheme):
            out = hd.attention(*leaves, plan=plan, scheme=scheme)
            return torch.autograd.grad(out, leaves, out.detach())

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = call()
        for seed in (2, 1):
            with torch.no_grad():
                for x, y in zip(leaves, operands(seed, 1000)):
                    x.copy_(hd.shard(y, plan, rank))
            graph.replay()
            for a, b in zip(found, call()):
                assert torch.equal(a, b), (scheme, seed)


def check_under_load(rank, ranks):
    """Many calls, forward and backward, in parts and whole, and steps of decoding between them, without a timeout and with one rank's GPU
    late or another's: bits are those of exchanges that are waited for."""
    problems = []
    groups = {by: dist.new_group(list(range(ranks))) for by in (None, "turns", "once")}  # each has memory of its own
    for rows, heads, documents in (
        (1153, (8, 2), None),
        (700, (4, 4), None),
        (1150, (8, 4), [0, 3, 130, 131, 700, 1150]),
    ):
        shape = dict(heads=heads[0], kv_heads=heads[1], head_size=128, causal="top_left")
        if documents:
            shape |= dict(cu_seqlens=documents, order="balanced")
        plan = hd.plan(rows, ranks, **shape)
        torch.manual_seed(rows)
        whole = [torch.randn(1, rows, h, 128).to(DEVICE, torch.bfloat16) for h in (*heads, heads[1], heads[0])]
        leaves = [hd.shard(x, plan, rank).requires_grad_() for x in whole[:3]]
        weight = hd.shard(whole[3], plan, rank)
        for scheme in ("gather", "needed", "ring"):
            for by, group in groups.items():

                def call(plan=plan, leaves=leaves, weight=weight, scheme=scheme, by=by, group=group, **options):
                    with chunked_at_once(by == "once"):
                        options["chunked"] = by is not None
                        out = hd.attention(*leaves, plan=plan, scheme=scheme, group=group, **options)
                        return out, *torch.autograd.grad(out, leaves, weight)

                problems.append((call, call(timeout=SECONDS)))
    q, k, v = operands(3, 640)
    cache, q = [x[:, rank::ranks].contiguous() for x in (k, v)], q[:, :1].contiguous()
    problems.append((lambda **options: (hd.decode(q, *cache, **options),), (hd.decode(q, *cache, timeout=SECONDS),)))
    of_all, of_rank = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
    wrong = torch.zeros(len(problems), dtype=torch.int64, device=DEVICE)
    for n in range(LOAD):
        chosen = int(torch.randint(len(problems), (1,), generator=of_all))
        call, expected = problems[chosen]
        if torch.rand((), generator=of_rank) < 0.5 and DEVICE == "cuda":
            torch.cuda._sleep(int(torch.randint(3_000_000, (1,), generator=of_rank)))
        for a, b in zip(call(), expected):
            wrong[chosen] += (a != b).any()
        if n % 100 == 99:
            assert not wrong.any(), (n, wrong.tolist())
    assert not wrong.any(), wrong.tolist()


def check_odd_operands(rank, ranks):
    """No sequence at all; keys that are one row, expanded; gradients behind a call under inference_mode, which makes what is kept; and
    softcap, whose kernels have no offsets. As with exchanges that are waited for."""
    plan = hd.plan(640, ranks, heads=8, kv_heads=2, head_size=64, causal="top_left")
    q, k, v = (hd.shard(x, plan, rank) for x in operands(1, 640))
    group = dist.new_group(list(range(ranks)))
    for operands_of, options in (
        ((q[:0], k[:0], v[:0]), {}),
        ((q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)), {}),
        ((q, k, v), dict(softcap=20.0)),
    ):
        with torch.inference_mode():
            hd.attention(*operands_of, plan=plan, scheme="gather", group=group, **options)
        found = []
        for timeout in (None, SECONDS):
            leaves = [x.detach().requires_grad_() for x in operands_of]
            out = hd.attention(*leaves, plan=plan, scheme="gather", group=group, timeout=timeout, **options)
            found.append((out, *torch.autograd.grad(out.float().sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*found)), options


def check_an_error_in_between(rank, ranks):
    """A call that raises on all ranks once keys are on their way: those behind it are right."""
    plan = hd.plan(640, ranks, heads=8, kv_heads=2, head_size=64, causal="top_left")
    q, k, v = (hd.shard(x, plan, rank) for x in operands(1, 640))
    q16, cache = q[:, :1].contiguous(), (k, v)
    expected = hd.attention(q, k, v, plan=plan, scheme="gather", timeout=SECONDS)
    step = hd.decode(q16, *cache, timeout=SECONDS)
    for _ in range(3):
        for module, call in (
            (keys, lambda: hd.attention(q, k, v, plan=plan, scheme="gather")),
            (decode_module, lambda: hd.decode(q16, *cache)),
        ):
            name = "attend" if module is keys else "attention"
            with mock.patch.object(module, name, side_effect=MemoryError("as if")):
                try:
                    call()
                except MemoryError:
                    pass
                else:
                    raise AssertionError("it was not called")
        assert torch.equal(hd.attention(q, k, v, plan=plan, scheme="gather"), expected)
        assert torch.equal(hd.decode(q16, *cache), step)


def check_graphs_and_growth(rank, ranks):
    """What a graph was captured with stays, however often longer calls need more."""
    q, k, v = operands(3, 640)
    group = dist.new_group(list(range(ranks)))
    cache, q = [x[:, rank::ranks].contiguous() for x in (k, v)], q[:, :1].contiguous()
    expected = hd.decode(q, *cache, group=group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = hd.decode(q, *cache, group=group)
    for rows in (8_000, 16_000, 32_000):
        plan = hd.plan(rows, ranks, heads=8, kv_heads=2, head_size=64, causal="top_left")
        hd.attention(*(hd.shard(x, plan, rank) for x in operands(4, rows)), plan=plan, scheme="gather", group=group)
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected), rows


def check_checkpointing(rank, ranks):
    """What a backward computes again is served inside of sdpa, in autograd's own thread."""
    plan = hd.plan(200, ranks, heads=8, kv_heads=8, head_size=64, causal="top_left")
    torch.manual_seed(9)
    given = hd.shard(torch.randn(1, 200, 8, 64), plan, rank).transpose(1, 2).to(DEVICE, torch.bfloat16)

    def layer(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    found = []
    for reentrant in (None, True, False):
        x = given.clone().requires_grad_()
        with hd.sdpa(plan, timeout=SECONDS):
            out = (
                layer(x) if reentrant is None else torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            )
            out.float().square().sum().backward()
        found.append(x.grad)
    assert all(torch.equal(found[0], each) for each in found), [(found[0] - each).abs().max() for each in found]


def check_decode_in_a_graph(rank, ranks):
    q, k, v = operands(3, 640)
    cache = [x[:, rank::ranks].contiguous() for x in (k, v)]
    slots = cache[0].shape[1]
    q, held = q[:, :1].contiguous(), torch.tensor([slots // 2], dtype=torch.int32, device=DEVICE)
    hd.decode(q, *cache, held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hd.decode(q, *cache, held)
    for count in (slots // 2, 1, slots):
        held.fill_(count)
        graph.replay()
        assert torch.equal(out, hd.decode(q, *cache, held)), count


def check_decode_kernels(rank, ranks):
    """A rank's part of the keys is split."""
    q, k, v = operands(3, 640)
    held = torch.tensor([640], dtype=torch.int32, device=DEVICE)
    positions = dict(q_offset=held, key_offset=held.new_tensor([rank]), key_step=ranks, causal="top_left")
    for options in ({}, positions):
        found = heddle.explain(q[:, :1], k, v, seqused_k=held, out_dtype="float32", **options)
        assert found.chosen.name.endswith("_decode" if DEVICE == "cuda" else "cpu"), found


def check_peers(rank, ranks):
    """GPUs of one host write into each other's memory, unless they are told not to."""
    plan = hd.plan(640, ranks, heads=8, kv_heads=2, head_size=64, causal="top_left")
    q, k, v = (hd.shard(x, plan, rank) for x in operands(1, 640))
    hd.attention(q, k, v, plan=plan, scheme="gather")
    kept = hd.kept_memory()
    reached = all(torch.cuda.can_device_access_peer(rank, r) for r in range(ranks) if r != rank)
    assert (kept > 0) == reached, (kept, reached)
    group = dist.new_group(list(range(ranks)))
    with mock.patch.dict(os.environ, {peers.VARIABLE: "nccl"}):
        expected = hd.attention(q, k, v, plan=plan, scheme="gather", group=group)
    assert hd.kept_memory(group) == 0
    assert torch.equal(hd.attention(q, k, v, plan=plan, scheme="gather"), expected)
    group, said = dist.new_group(list(range(ranks))), ""
    with mock.patch.dict(os.environ, {peers.VARIABLE: "mpi" if rank == 1 else ""}):
        try:
            hd.attention(q, k, v, plan=plan, scheme="gather", group=group)
        except ValueError as error:
            said = str(error)
    assert f"{peers.VARIABLE} on rank 1: it must be nccl, or not be set" in said, said
    hd.release_memory()
    assert hd.kept_memory() == 0
    assert torch.equal(hd.attention(q, k, v, plan=plan, scheme="gather"), expected)


def check_made_anew(rank, ranks):
    """The group is taken down and made again, of the same name, with the ranks the other way round."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("place", tempfile.mkdtemp())
    place, files = store.get("place").decode(), 0
    plan = hd.plan(640, ranks, heads=8, kv_heads=2, head_size=64, causal="top_left")
    whole = operands(1, 640)
    right = heddle.attention(*whole, causal="top_left")
    for own in (rank, ranks - 1 - rank):
        q, k, v = (hd.shard(x, plan, own) for x in whole)
        for _ in range(3):
            out = hd.attention(q, k, v, plan=plan, scheme="gather")
            step = hd.decode(q[:, :1], k, v)
        mine = hd.shard(right, plan, own)
        assert (out - mine).norm() <= 5e-3 * mine.norm()
        assert torch.equal(out, hd.attention(q, k, v, plan=plan, scheme="gather", timeout=SECONDS))
        assert torch.equal(step, hd.decode(q[:, :1], k, v, timeout=SECONDS))
        dist.destroy_process_group()
        files, following = files + 1, ranks - 1 - own
        where = f"file://{place}/{files}"
        dist.init_process_group(BACKEND, init_method=where, rank=following, world_size=ranks, timeout=WAIT)
        dist.barrier()  # none is gone while another connects


def check_killed(rank, ranks):
    """A rank is gone before a call without a timeout: the others' GPUs end it, by the group's own, and say so when they are waited for."""
    group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=5))
    plan = hd.plan(640, ranks, heads=8, kv_heads=2, head_size=64, causal="top_left")
    q, k, v = (hd.shard(x, plan, rank) for x in operands(1, 640))
    hd.attention(q, k, v, plan=plan, scheme="gather", group=group)
    torch.cuda.synchronize()
    assert hd.kept_memory(group) > 0
    dist.barrier()
    torch.cuda.synchronize()
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        hd.attention(q, k, v, plan=plan, scheme="gather", group=group)
        torch.cuda.synchronize()
    except RuntimeError as error:
        assert "CUDA error" in str(error), error
    else:
        raise AssertionError("nothing was said")
    assert 3 < time.monotonic() - begin < 30


def check_what_is_not_captured(rank, ranks):
    """A call that ranks have not compared, and one with a timeout; and a group that does not carry GPUs' tensors is told of."""
    plan = hd.plan(64, ranks, heads=8, kv_heads=2, head_size=64)
    q, k, v = (hd.shard(x, plan, rank) for x in operands(4, 64))

    def call(**options):
        return hd.attention(q, k, v, plan=plan, scheme="gather", **options)

    def captured(**options):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(**options)

    for function, options, words in (
        (captured, {}, "the call is captured in a graph and ranks have not compared it: make it once before"),
        (
            call,
            dict(group=dist.new_group(backend="gloo")),
            "which the group does not carry (its backend for them: gloo)",
        ),
        (call, dict(timeout=SECONDS), None),
        (captured, dict(timeout=SECONDS), "keys gathered: the stream is captured and timeout is 60"),
    ):
        said = None
        try:
            function(**options)
        except (RuntimeError, ValueError) as error:
            said = str(error)
        assert said == words or (words and words in str(said)), said
    assert call().shape == q.shape


def check_refused_gradients(rank, ranks):
    """Before anything is sent: a rank without rows would wait for the others else."""
    striped = dict(order="striped", causal="top_left", window=(0, 0))
    for given, has_bias, words in (
        ({}, True, "bias requires a gradient: pieces of a call have none of it on GPUs"),
        (striped, False, "deterministic is True, the plan's order is 'striped' and its window (0, 0)"),
    ):
        plan = hd.plan(1, ranks, heads=8, kv_heads=2, head_size=64, **given)
        q, k, v = (hd.shard(x, plan, rank).requires_grad_() for x in operands(5, 1))
        bias = torch.zeros(1, 1, q.shape[1], 1, device=DEVICE).requires_grad_() if has_bias else None
        try:
            hd.attention(q, k, v, plan=plan, scheme="gather", timeout=SECONDS, bias=bias)
        except ValueError as error:
            assert words in str(error), error
        else:
            assert DEVICE == "cpu", "nothing was said"


def check_split_weights(rank, ranks):
    """A block whose weights are split is the block, with its gradients."""
    torch.manual_seed(6)
    block = heddle.nn.TransformerBlock(256, 8, 512, kv_heads=4, norm="rms_norm", activation="swiglu", causal="top_left")
    block, x = block.to(DEVICE), torch.randn(2, 70, 256).to(DEVICE)
    found = []
    for of in (block, heddle.nn.TensorParallelBlock(block, timeout=SECONDS)):
        leaf = x.clone().requires_grad_()
        out = of(leaf)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaf)))
    for one, split in zip(*found):
        assert (one - split).norm() <= 1e-4 * one.norm(), (one - split).abs().max()


def worlds():
    of_cases = {case.name: (distributed_ranks.check_case, (case,)) for case in cases()}
    of_decode = {f"decode {case.name}": (decode_ranks.check_case, (case,)) for case in decode_ranks.cases()}
    wide = dict(heads=(32, 8), sizes=(128, 128), dtype=torch.bfloat16, lengths=(1700, 3, 900))
    of_decode["decode wide"] = (decode_ranks.check_case, (dataclasses.replace(decode_ranks.cases()[0], **wide),))
    wide |= dict(lengths=(1700, 5, 900), fp8=True, paged=True, in_turn=True, rows=4, causal="top_left")
    of_decode["decode wide in 8 bits"] = (
        decode_ranks.check_case,
        (dataclasses.replace(decode_ranks.cases()[0], **wide),),
    )
    functions = [check_without_waiting, check_decode_kernels, check_refused_gradients, check_split_weights]
    functions += [check_checkpointing, check_under_load, check_odd_operands, check_an_error_in_between]
    if torch.cuda.device_count() > 1:
        functions += [check_in_a_graph, check_gradients_in_a_graph, check_decode_in_a_graph, check_what_is_not_captured]
        functions += [check_peers, check_graphs_and_growth]
    others = {function.__name__: (function, ()) for function in functions}
    ranks = min(max(torch.cuda.device_count(), 2), 4)
    out = {"gpus": (ranks, of_cases | of_decode | others)}
    if torch.cuda.device_count() != 1:  # copies over gloo have no timeout of their own
        out["slow"] = (ranks, {"lost": (distributed_ranks.check_lost, ("gather", True))})
        out["dead"] = (ranks, {"lost": (distributed_ranks.check_lost, ("gather", False))})
    if torch.cuda.device_count() > 1:
        out["dead_by_copies"] = (ranks, {"killed": (check_killed, ())})
        out["anew"] = (ranks, {"made anew": (check_made_anew, ())})
        out |= cuda_rank_programs.worlds()
    return out


if __name__ == "__main__":
    distributed_ranks.main(sys.argv[1], worlds())
