"""Runs attention over processes under torch.compile: what test_distributed_compiled.py asks.

usage: compiled_ranks.py RESULTS.json
"""

import contextlib
import importlib.util
import os
import sys

import distributed_ranks
import heddle
import heddle.distributed as hd
import torch
import torch._dynamo
import torch._inductor.compile_fx  # before processes are forked, none of which then waits for it
import torch.distributed as dist
import torch.nn.functional as F
from distributed_ranks import SECONDS
from sdpa_ranks import LENGTH, VOCABULARY, _llama, _results
from torch._dynamo.testing import CompileCounterWithBackend


def same(name, compiled, own):
    assert len(compiled) == len(own)
    for n, (found, right) in enumerate(zip(compiled, own)):
        assert found.dtype == right.dtype and torch.equal(found, right), f"{name}: result {n} differs"


def with_gradients(call, tensors):
    """Results, and gradients of all of them; lse without keys is left out."""
    results = call(*tensors)
    loss = sum((x * torch.arange(x.numel()).view(x.shape)).sum() for x in results)
    leaves = [x for x in tensors if x.requires_grad]
    return [x.detach() for x in (*results, *torch.autograd.grad(loss, leaves))]


def check_attention(backend, rank, ranks):
    """The same bits as without, forward and backward, in one graph."""
    torch.manual_seed(5)
    group = dist.new_group(list(range(ranks)))
    for name, rows, scheme, packed, given, options in (
        ("zigzag", 37, "gather", False, dict(causal="top_left"), dict(softcap=3.0)),
        ("striped", 38, "ring", False, dict(causal="top_left", order="striped"), dict(group=group, scale=0.3)),
        ("documents", 41, "needed", True, dict(causal="top_left", cu_seqlens=[0, 9, 41], order="balanced"), {}),
        ("bias", 35, "needed", False, dict(causal="top_left"), dict(bias=True)),
        ("heads", 33, "ulysses", False, dict(window=(4, 2)), {}),
        ("a rank without rows", 1, "auto", False, {}, {}),
    ):
        plan = hd.plan(rows, ranks, heads=4, kv_heads=2, head_size=8, dtype="float32", **given)
        whole = [torch.randn(1, rows, heads, 8) for heads in (4, 2, 2)]
        tensors = [hd.shard(x, plan, rank) for x in whole] + [torch.randn(4)]
        if packed:
            tensors[:3] = [x[0] for x in tensors[:3]]
        tensors = [x.requires_grad_() for x in tensors]
        options |= dict(plan=plan, scheme=scheme, timeout=SECONDS)
        if options.pop("bias", False):
            tensors.append(
                torch.randn(1, 4, plan.rows_of(rank), rows).requires_grad_(distributed_ranks.DEVICE == "cpu")
            )

        def call(q, k, v, sink, bias=None, options=options):
            out, lse = hd.attention(q * 2, k, v, sink=sink, bias=bias, return_lse=True, **options)
            return out + 1, lse

        torch._dynamo.reset()  # what is traced anew too often for one piece of code is refused
        own = with_gradients(call, tensors)
        compiled = torch.compile(call, backend=backend, fullgraph=True)
        same(name, with_gradients(compiled, tensors), own)
        # Without a derivative of lse.
        leaves = [x for x in tensors if x.requires_grad]
        same(name, *(torch.autograd.grad(f(*tensors)[0].square().sum(), leaves) for f in (compiled, call)))


def check_inductor(rank, ranks):
    """What is the operator alone, of which nothing is left for a compiler of C++."""
    plan = hd.plan(19, ranks, heads=2, head_size=8, causal="top_left")
    torch.manual_seed(5)
    tensors = [hd.shard(torch.randn(1, 19, 2, 8), plan, rank).requires_grad_() for _ in range(3)]
    d_out = hd.shard(torch.randn(1, 19, 2, 8), plan, rank)
    call = lambda *x: hd.attention(*x, plan=plan, timeout=SECONDS)
    results = [(out, *torch.autograd.grad(out, tensors, d_out)) for out in (f(*tensors) for f in (call, torch.compile(call, fullgraph=True)))]  # fmt: skip
    same("inductor", *results)


def check_sdpa(backend, rank, ranks):
    """A model that was traced before the ``with`` is traced anew in it, for another plan, and behind it; for the same it is not."""
    torch.manual_seed(5)
    whole = torch.randn(1, 2, 21, 8)
    counter = CompileCounterWithBackend(backend)

    def model(x):
        return (F.scaled_dot_product_attention(x * 2, x, x, is_causal=True) + 1,)

    compiled = torch.compile(model, backend=counter, fullgraph=True)
    plans = [hd.plan(21, ranks, heads=2, head_size=8, causal="top_left", window=(w, 0)) for w in (-1, 5)]
    mine = hd.shard(whole, plans[0], rank, dim=2).requires_grad_()
    before = with_gradients(model, [mine])
    same("before", with_gradients(compiled, [mine]), before)
    assert counter.frame_count == 1
    results = []
    for n in (0, 1, 0, 1):
        with hd.sdpa(plans[n], timeout=SECONDS):
            own = with_gradients(model, [mine])
        with hd.sdpa(plans[n], timeout=SECONDS):
            for _ in range(2):
                results.append(with_gradients(compiled, [mine]))
                same(f"plan {n}", results[-1], own)
    assert not torch.equal(results[0][0], before[0]) and not torch.equal(results[0][0], results[2][0])
    assert counter.frame_count == 3, counter.frame_count
    same("behind", with_gradients(compiled, [mine]), before)
    assert counter.frame_count == 3
    with hd.sdpa(plans[0], timeout=SECONDS), torch.autocast(distributed_ranks.DEVICE, torch.bfloat16):
        own = model(mine)
        assert own[0].dtype == torch.bfloat16
        same("autocast", compiled(mine), own)


def check_decode(backend, rank, ranks):
    """A position that grows is traced anew once, to be a number of any value."""
    torch.manual_seed(5)
    keys, q = torch.randn(2, 2, 40, 2, 8), torch.randn(2, 40, 4, 8)
    sink = torch.randn(4)
    k_cache, v_cache = torch.zeros(2, 2, 40, 2, 8)
    held = torch.zeros(2, dtype=torch.int32)
    counter = CompileCounterWithBackend(backend)

    def step(q, k_cache, v_cache, held, position):
        return hd.decode(
            q * 2, k_cache, v_cache, held, q_offset=position, key_offset=rank, key_step=ranks, causal=heddle.Causal.top_left, window=(6, 0), sink=sink,
            return_lse=True, timeout=SECONDS,
        )  # fmt: skip

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for position in range(12):
        if position % ranks == rank:
            heddle.append_kv_cache(*keys[:, :, position : position + 1].contiguous(), k_cache, v_cache, held)
            held += 1
        given = (q[:, position : position + 1], k_cache, v_cache, held, position)
        same(f"step {position}", compiled(*given), step(*given))
    assert counter.frame_count <= 4, counter.frame_count  # 0, 1 and any other


def check_model(rank, ranks):
    """Layers of an unchanged model of transformers, each compiled, as docs/distributed.md has it."""
    plan = hd.plan(LENGTH, ranks, heads=4, kv_heads=2, head_size=8, causal="top_left")
    torch.manual_seed(9)
    ids, targets = (hd.shard(x, plan, rank) for x in torch.randint(VOCABULARY, (2, 1, LENGTH)))
    around = lambda: hd.sdpa(plan, timeout=SECONDS)
    given = dict(position_ids=torch.from_numpy(plan.position_ids(rank))[None], attention_mask=torch.ones_like(ids))
    found = []
    for compiled in (False, True):
        model = _llama()
        for layer in model.model.layers if compiled else ():
            layer.compile(backend="aot_eager", fullgraph=True)
        logits, gradients = _results(model, ids, targets, around, **given)
        found.append([logits, *gradients.values()])
    same("model", *found)


def check_words(rank, ranks):
    """What is refused, and what ranks do not agree on, is said as without."""
    plan = hd.plan(6, ranks, heads=2, head_size=8, order="contiguous")
    x = torch.randn(1, plan.rows_of(rank), 2, 8)
    call = torch.compile(lambda x, cap: hd.attention(x, x, x, plan=plan, softcap=cap, timeout=SECONDS), backend="eager")
    for given, text in (
        ((x, float(rank)), "[distributed.attention] ranks do not agree: softcap is 0.0 on rank 0 and 1.0 on rank 1"),
        ((x[:, 1:], 0.0), f"[distributed.attention] q is [1, {x.shape[1] - 1}, 2, 8]: rank {rank} of the plan has"),
        ((x[..., None], 0.0), f"[distributed.attention] q is {[*x.shape, 1]}: q, k and v must be [B, rows, heads, head size]"),
    ):  # fmt: skip
        try:
            call(*given)
        except ValueError as error:
            assert str(error).startswith(text), error
        else:
            raise AssertionError("nothing was said")


def worlds():
    checks = {"words": (check_words, ()), "inductor": (check_inductor, ())}
    for backend in ("eager", "aot_eager"):
        for check in (check_attention, check_sdpa, check_decode):
            checks[f"{check.__name__[6:]}_{backend}"] = (check, (backend,))
    if importlib.util.find_spec("transformers"):
        checks["model"] = (check_model, ())
    return {"2": (2, checks)}


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # before processes are forked, as above
        from transformers import LlamaForCausalLM  # noqa: F401
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    distributed_ranks.main(sys.argv[1], worlds())
