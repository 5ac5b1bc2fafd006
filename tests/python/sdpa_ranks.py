"""Runs models that call torch's scaled_dot_product_attention over processes: what test_distributed_sdpa.py asks.

usage: sdpa_ranks.py RESULTS.json
"""

import _thread
import concurrent.futures
import contextlib
import importlib.util
import sys
import threading

import distributed_ranks
import heddle.distributed as hd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_ranks import SECONDS

VOCABULARY = 61
LENGTH = 45


def close(name, found, exactly, single):
    """The accuracy rule: a small multiple of one process's own error."""
    assert found.shape == single.shape, name
    error, of_one = ((x.double() - exactly).abs().max().item() for x in (found, single))
    assert not error > 4 * of_one + 1e-6 * exactly.abs().max().item(), (
        f"{name}: off by {error}, one process by {of_one}"
    )


def check_calls(rank, ranks):
    """Calls alone, with their gradients: torch's own in double are right."""
    causal = dict(is_causal=True)
    for name, plan_options, kv_heads, options in (
        ("causal", dict(causal="top_left"), 4, causal),
        ("all", dict(order="contiguous"), 4, dict(scale=0.2)),
        ("shared", dict(causal="bottom_right", order="striped"), 2, dict(causal, enable_gqa=True)),
    ):
        torch.manual_seed(2)
        whole = [torch.randn(2, heads, LENGTH, size) for heads, size in ((4, 16), (kv_heads, 16), (kv_heads, 24))]
        d_out = torch.randn(2, 4, LENGTH, 24)
        plan = hd.plan(LENGTH, ranks, heads=4, kv_heads=kv_heads, head_size=16, head_size_v=24, **plan_options)

        def results(x, cotangent, options=options):
            x = [part.clone().requires_grad_() for part in x]
            out = F.scaled_dot_product_attention(*x, **options)
            return [out.detach(), *torch.autograd.grad(out, x, cotangent)]

        right = results([x.double() for x in whole], d_out.double())
        one = results(whole, d_out)
        for scheme in ("gather", "ring"):
            with hd.sdpa(plan, scheme=scheme, timeout=SECONDS):
                found = results(*_shards(whole, plan, rank), hd.shard(d_out, plan, rank, dim=2))
            for n, (mine, exactly, single) in enumerate(zip(found, right, one)):
                close(f"{name} {scheme} {n}", mine, *(hd.shard(x, plan, rank, dim=2) for x in (exactly, single)))


def _shards(whole, plan, rank):
    return [[hd.shard(x, plan, rank, dim=2) for x in whole]]


def check_given_back(rank, ranks):
    """Before, after, and after an error, calls are torch's; inside of another, the inner plan is asked."""
    torch.manual_seed(2)
    x = torch.randn(1, 2, 6, 8)
    own = F.scaled_dot_product_attention(x, x, x)
    plan, causal = (
        hd.plan(6 * ranks, ranks, heads=2, head_size=8, order="contiguous", causal=c) for c in ("none", "top_left")
    )
    with hd.sdpa(plan, timeout=SECONDS) as outer:
        spread = F.scaled_dot_product_attention(x, x, x)
        with hd.sdpa(causal, timeout=SECONDS):
            inner = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        again = F.scaled_dot_product_attention(x, x, x)
    # Every rank has the same rows here: to attend them all is to attend one's own.
    assert torch.allclose(spread, own, atol=1e-6) and torch.equal(spread, again)
    last = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert torch.allclose(inner, last, atol=1e-6) == (rank == 0)
    with contextlib.suppress(KeyError), outer:
        raise KeyError
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), own)


def check_threads(rank, ranks):
    """Another thread's calls are torch's, meanwhile too."""
    torch.manual_seed(2 + rank)
    x = torch.randn(1, 2, 6, 8)
    own = F.scaled_dot_product_attention(x, x, x)
    plan = hd.plan(6 * ranks, ranks, heads=2, head_size=8, order="contiguous")
    with hd.sdpa(plan, timeout=SECONDS), concurrent.futures.ThreadPoolExecutor() as pool:
        theirs = pool.submit(F.scaled_dot_product_attention, x, x, x).result()
        here = F.scaled_dot_product_attention(x, x, x)
    assert torch.equal(theirs, own) and not torch.allclose(here, own, atol=1e-3)


def check_encoder(rank, ranks):
    """torch's own encoder layer, whose forward for inference goes past the function."""
    torch.manual_seed(2)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dropout=0.0).eval()
    x = torch.randn(2, LENGTH, 32)
    plan = hd.plan(LENGTH, ranks, heads=4, head_size=8, order="contiguous")
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        whole = layer(x)
        with hd.sdpa(plan, timeout=SECONDS):
            mine = layer(hd.shard(x, plan, rank))
    assert torch.allclose(mine, hd.shard(whole, plan, rank), atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


def check_autocast(rank, ranks):
    """Mixed operands, as rotary embeddings in float32 make them, are cast as torch casts them."""
    torch.manual_seed(2)
    q, v = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16).bfloat16()
    plan = hd.plan(8, ranks, heads=2, head_size=16, causal="top_left")
    with torch.autocast("cpu"):
        one = F.scaled_dot_product_attention(q, q, v, is_causal=True)
        with hd.sdpa(plan, timeout=SECONDS):
            mine = [hd.shard(x, plan, rank, dim=2) for x in (q, q, v)]
            out = F.scaled_dot_product_attention(*mine, is_causal=True)
    assert out.dtype == one.dtype == torch.bfloat16
    assert torch.allclose(out.float(), hd.shard(one, plan, rank, dim=2).float(), atol=2e-2)


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(8)
    return LlamaForCausalLM(config).train()


def _results(model, ids, targets, around=contextlib.nullcontext, **given):
    """Logits, and the gradients of the mean loss of all ranks' tokens that these give."""
    with around():
        logits = model(ids, use_cache=False, **given).logits
        loss = F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum") / (2 * LENGTH)
        loss.backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def check_model(documents, checkpointing, rank, ranks):
    """An unchanged model of transformers: logits and gradients are one process's."""
    torch.manual_seed(9)
    ids, targets = torch.randint(VOCABULARY, (2, 2, LENGTH)).unbind()
    order = "zigzag" if documents is None else "balanced"
    plan = hd.plan(
        LENGTH, ranks, heads=4, kv_heads=2, head_size=8, batch=2, dtype="float32", causal="top_left", cu_seqlens=documents,
        order=order,
    )  # fmt: skip
    whole = {}
    if documents is not None:  # by which the model itself tells documents apart
        whole["position_ids"] = torch.cat([torch.arange(b - a) for a, b in zip(documents, documents[1:])]).expand(2, -1)
    exact = _results(_llama().double(), ids, targets, **whole)
    one = _results(_llama(), ids, targets, **whole)

    model = _llama()
    if checkpointing:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    mine, its_targets = (hd.shard(x, plan, rank) for x in (ids, targets))
    logits, gradients = _results(
        model,
        mine,
        its_targets,
        lambda: hd.sdpa(plan, timeout=SECONDS),
        position_ids=torch.from_numpy(plan.position_ids(rank)).expand(2, -1),
        attention_mask=torch.ones_like(mine),
    )
    close("logits", hd.unshard(logits, plan), exact[0], one[0])
    for name, gradient in gradients.items():
        dist.all_reduce(gradient)
        close(name, gradient, exact[1][name], one[1][name])


def check_refused_mask(rank, ranks):
    """Without an attention_mask the model takes positions that begin anew for documents, and makes a mask of this rank's rows."""
    plan = hd.plan(LENGTH, ranks, heads=4, kv_heads=2, head_size=8, causal="top_left")
    mine = torch.zeros(1, plan.rows_of(rank), dtype=torch.long)
    positions = torch.from_numpy(plan.position_ids(rank))[None]
    if positions.diff().eq(1).all():  # the last rank of zigzag has one range
        return
    try:
        with hd.sdpa(plan, timeout=SECONDS):
            _llama()(mine, position_ids=positions, use_cache=False)
    except ValueError as error:
        assert str(error).startswith("[distributed.sdpa] attn_mask is given, [1, 1, "), error
    else:
        raise AssertionError("the mask was taken")


def check_checkpointing_outside(rank, ranks):
    """What is computed again after the end is torch's own, which its checkpointing notices."""
    plan = hd.plan(8, ranks, heads=2, head_size=16)
    x = torch.randn(1, 2, plan.rows_of(rank), 16, requires_grad=True)
    layer = lambda x: F.scaled_dot_product_attention(x, x, x)
    with hd.sdpa(plan, timeout=SECONDS):
        out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    try:
        out.sum().backward()
    except torch.utils.checkpoint.CheckpointError:
        return
    raise AssertionError("nothing was said")


def check_checkpointing_in_a_thread(rank, ranks):
    """A backward of GPUs' tensors runs in a thread of autograd's own, as one does here: what it computes again is served."""
    plan = hd.plan(8, ranks, heads=2, head_size=16)
    torch.manual_seed(rank)
    given = torch.randn(1, 2, plan.rows_of(rank), 16)
    layer = lambda x: F.scaled_dot_product_attention(x, x, x)
    found = []
    for reentrant in (None, True, False):
        x = given.clone().requires_grad_()
        with hd.sdpa(plan, timeout=SECONDS):
            out = (
                layer(x) if reentrant is None else torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            )
            loss, over = out.square().sum(), threading.Event()

            def backward(loss=loss, over=over):
                try:
                    loss.backward()
                finally:
                    over.set()

            _thread.start_new_thread(backward, ())  # as those are, none of Python's own
            assert over.wait(SECONDS)
        found.append(x.grad)
    assert all(torch.equal(found[0], each) for each in found), found


def worlds():
    checks = {
        "calls": (check_calls, ()),
        "given_back": (check_given_back, ()),
        "threads": (check_threads, ()),
        "encoder": (check_encoder, ()),
        "autocast": (check_autocast, ()),
        "checkpointing_outside": (check_checkpointing_outside, ()),
        "checkpointing_in_a_thread": (check_checkpointing_in_a_thread, ()),
    }
    out = {"2": (2, checks)}
    if importlib.util.find_spec("transformers"):
        checks |= {
            "model": (check_model, (None, False)),
            "model_documents": (check_model, ([0, 7, 30, 31, LENGTH], False)),
            "model_checkpointing": (check_model, (None, True)),
            "refused_mask": (check_refused_mask, ()),
        }
        out["page"] = (2, {"page": (distributed_ranks.check_page, ("## An unchanged model",))})
    return out


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # before processes are forked, none of which then waits for it
        from transformers import LlamaForCausalLM  # noqa: F401
    distributed_ranks.main(sys.argv[1], worlds())
