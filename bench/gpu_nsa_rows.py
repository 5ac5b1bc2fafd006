"""What `make bench-gpu` times of native sparse attention (docs/nsa.md): the whole operation, forward and backward, beside
flash-linear-attention's and beside dense attention; ways of sharing; decoding; memory. Its parts: gpu_nsa_part_rows.py.

Of the timed outputs sampled rows, and the gradients of some keys, are compared with float64 (gpu_nsa_reference.py); those of
dense attention with its own. flash-linear-attention chooses blocks by another rule, so it is compared over lists that it is
given, with the naive functions in float64: gradients and few keys once for each form at 2048 keys, forwards of more keys at their
own number, in the last rows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import gpu_peers as peers
import heddle
import heddle.nsa
import sources
import torch
from gpu_backward_rows import both, gradients, weight_of
from gpu_nsa_reference import Whole, decoded
from gpu_nsa_reference import dense as expected_dense
from gpu_reference import Attention, distance, sampled
from gpu_rows import Row, random

SIZE, BLOCK, BLOCKS, WINDOW = 128, 64, 16, 512
LENGTHS = (8192, 16384, 32768, 65536)
HEADS = ((64, 4), (32, 8))
CHECKED, LAST = 2048, 64  # of flash-linear-attention: keys; rows that are compared where there are more keys
# Of a sampled row's norm, in bf16: probabilities, branches and results are each rounded.
LIMIT, GRADIENT_LIMIT = 0.01, 0.02
#: A file of torch.save: q, k, v [B, T, heads, D], and maybe g_cmp, g_slc, g_swa [B, T, heads], of a model's layer (--tensors).
TENSORS: Path | None = None


def operands(batch, length, heads, kv_heads, size=SIZE):
    """q, k, v, g_cmp, g_slc, g_swa."""
    q, k, v = (random(batch, length, h, size) for h in (heads, kv_heads, kv_heads))
    return [q, k, v, *torch.sigmoid(random(3, batch, length, heads))]


def captured():
    found = torch.load(TENSORS, map_location="cuda", weights_only=True)
    q = found["q"]
    gates = [found.get(name) for name in ("g_cmp", "g_slc", "g_swa")]
    gates = [torch.sigmoid(random(*q.shape[:3])) if gate is None else gate for gate in gates]
    return [x.to(torch.bfloat16) for x in (q, found["k"], found["v"], *gates)]


def without_window(x, window):
    return x if window else [*x[:5], None]


def mine(x, window, lists=None, **sharing):
    return heddle.nsa.parallel_nsa(*x, lists, BLOCKS, BLOCK, window, **sharing)


def fla(x, window, lists=None) -> dict[str, Callable]:
    """{"fla": a call}, or nothing where it cannot be imported."""

    def call(module):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of lists that are given
            return module.parallel_nsa(*x, lists, BLOCKS, BLOCK, window)

    return peers.fla(call, window)


def leaves(x):
    return [None if y is None else y.detach().requires_grad_() for y in x]


def there(x):
    return [y for y in x if y is not None]


def lists_of(x, sharing):
    """The blocks that parallel_nsa chooses, by its own steps."""
    q, k, v = (y.detach() for y in x[:3])
    listing = sharing.get("query_stride", 1)
    at = listing if "cmp" in sharing.get("share_branches", ()) else 1
    with torch.no_grad():
        k_pooled, v_pooled = (heddle.nsa.pool_keys(y, BLOCK) for y in (k, v))
        over = {"causal": "top_left", "key_offset": BLOCK - 1, "key_step": BLOCK, "q_step": at, "return_lse": True}
        lse = heddle.attention(q[:, ::at], k_pooled, v_pooled, **over)[1]
        lse = lse if at == listing else lse[..., ::listing]
        most = min(BLOCKS, -(-k.shape[1] // BLOCK))
        return heddle.nsa.select_blocks(q[:, ::listing], k_pooled, most, lse=lse, block_size=BLOCK, q_step=listing)


def reference(x, window, calls, sharing=None, weight=None):
    """What each contender's outputs should be, and flash-linear-attention's not. weight: of o, for gradients."""
    made = {}
    for name in calls:
        shared = sharing or {} if name == "heddle" else {}
        if name in ("heddle", "default"):
            made[name] = Whole(x, lists_of(x, shared), BLOCK, window, shared).expected(weight)
    over_all = expected_dense(*x[:3], weight)
    return made | {name: over_all for name in calls if name in ("dense", "fa3")}


@functools.cache
def agreement(heads: int, kv_heads: int, window: int, backward: bool, length: int = CHECKED) -> dict[str, float]:
    """flash-linear-attention's largest distance from the naive functions in float64, over the same lists, at two key/value heads."""
    group, length = heads // kv_heads, CHECKED if backward else max(length, CHECKED)
    prepared = leaves if backward else list  # a graph of so many keys would take the GPU's memory
    x = prepared(without_window(operands(1, length, 2 * group, 2), window))
    with torch.no_grad():
        lists = heddle.nsa.select_blocks(x[0], heddle.nsa.pool_keys(x[1], BLOCK), BLOCKS, block_size=BLOCK)
    found = {}
    for name, call in fla(x, window, lists.long()).items():
        rows = slice(length - LAST if length > CHECKED else 0, None)
        wide = prepared([None if y is None else y.double() for y in x])
        q, k, v, g_cmp, g_slc, g_swa = (y if y is None or n in (1, 2) else y[:, rows] for n, y in enumerate(wide))
        exact = heddle.nsa.naive_nsa(q, k, v, g_slc, g_swa, lists[:, rows], BLOCKS, BLOCK, window)
        exact = exact + heddle.nsa.naive_nsa_compression(q, k, v, g_cmp, BLOCKS, BLOCK)[1]
        weight = random(*exact.shape)
        expected = [exact.detach()]
        if backward:
            expected += torch.autograd.grad(exact, there(wide), weight.double())
        try:
            o = call()
            outputs = [o.detach()[:, rows], *(torch.autograd.grad(o, there(x), weight) if backward else ())]
        except Exception as error:  # another's, whatever it is: outputs_of() says of the timed call
            print(f"fla at {CHECKED} keys, {heads} / {kv_heads} heads: {type(error).__name__}: {error}"[:300])
            found[name] = float("nan")
            continue
        distances = [distance(a, b) for a, b in zip(outputs, expected, strict=True)]
        found[name] = next((d for d in distances if d != d), max(distances))
    return found


def row(calls, reference, window=0, **more):
    about = {"work": 1, "unit": "calls/s", "limit": LIMIT, "kernel": "nsa", "sources": sources.NSA_GPU}
    absent = {} if "fla" in calls or "fla" in more.get("absent", {}) else {"fla": peers.why_no_fla(window)}
    return Row(calls, reference=reference, **{**about, **more, "absent": {**absent, **more.get("absent", {})}})


def dense(q, k, v):
    """Heddle's, and FlashAttention-3."""
    calls = {"dense": lambda: heddle.attention(q, k, v, causal="bottom_right")}
    return calls | peers.fa3_dense(q, k, v, causal=True)


def forwards(x, window):
    return {"heddle": lambda: mine(x, window), **fla(x, window), **dense(*x[:3])}


def forward_of(x, heads, kv_heads, window, **more):
    x = without_window(x, window)
    agrees = functools.partial(agreement, heads, kv_heads, window, False, x[0].shape[1])
    calls = forwards(x, window)
    return row(calls, functools.partial(reference, x, window, calls), window, agreement=agrees, **more)


def weight_for(make, q):
    """The weight of o in what `make`, gradients or both, times."""
    return torch.ones_like(q) if make is both else weight_of(q.shape, q.dtype)


def backward_of(x, heads, kv_heads, window, make=gradients, **more):
    """The backward alone, or with make=both all of it. Dense attention has gradients of q, k and v alone."""
    x = leaves(without_window(x, window))
    calls, absent = {}, {}
    for name, call in forwards(x, window).items():
        try:
            calls[name] = make(call, there(x) if name in ("heddle", "fla") else x[:3])
        except Exception as error:
            if name in ("heddle", "dense"):
                raise
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    agrees = functools.partial(agreement, heads, kv_heads, window, True)
    expected = lambda: reference(x, window, calls, weight=weight_for(make, x[0]))  # noqa: E731
    return row(calls, expected, window, agreement=agrees, absent=absent, **{"limit": GRADIENT_LIMIT, **more})


def forward(length, heads, kv_heads, window):
    return forward_of(operands(1, length, heads, kv_heads), heads, kv_heads, window)


def backward(length, heads, kv_heads, window):
    return backward_of(operands(1, length, heads, kv_heads), heads, kv_heads, window)


def memory(length, heads, kv_heads, window, backward=True):
    """The most that a forward, or forward and backward, have beside their operands: o, its branches, gradients and scratch
    memory."""
    x, how = operands(1, length, heads, kv_heads), {"unit": "MiB", "how": "memory"}
    if not backward:
        return forward_of(x, heads, kv_heads, window, **how)
    return backward_of(x, heads, kv_heads, window, both, **how)


def memory_shared(length, heads, kv_heads, preset):
    """Of forward and backward, with a window."""
    return shared(length, heads, kv_heads, preset, "backward", make=both, unit="MiB", how="memory")


def shared(length, heads, kv_heads, preset, direction, window=WINDOW, beside_fla=False, make=gradients, **more):
    """With `preset`, beside "default": without sharing. beside_fla: a forward, beside flash-linear-attention's, which has no
    sharing and is held to what it computes. make: of a backward, as for backward_of."""
    sharing = heddle.nsa.presets(heads // kv_heads)[preset]
    x = without_window(operands(1, length, heads, kv_heads), window)
    if direction == "backward":
        x = leaves(x)
    calls = {"heddle": lambda: mine(x, window, **sharing), "default": lambda: mine(x, window), **dense(*x[:3])}
    if direction == "backward":
        calls = {name: make(call, there(x) if name in ("heddle", "default") else x[:3]) for name, call in calls.items()}
    absent, agrees = {"fla": "it has no sharing"}, None
    if beside_fla:
        calls |= fla(x, window)
        absent, agrees = {}, functools.partial(agreement, heads, kv_heads, window, False, length)

    def expected():
        return reference(x, window, calls, sharing, weight_for(make, x[0]) if direction == "backward" else None)

    limit = GRADIENT_LIMIT if direction == "backward" else LIMIT
    return row(calls, expected, window, agreement=agrees, absent=absent, limit=limit, **more)


def decode(batch, length, heads, kv_heads, turns=4):
    """A step over full caches, in graphs: queries take turns, and with them the blocks that are read. The length is set back
    each time, so that each step appends the same key."""
    cache = heddle.nsa.Cache(batch, length, kv_heads, SIZE, block=BLOCK, dtype=torch.bfloat16, device="cuda")
    for x in (cache.k, cache.v):
        x.normal_()
    for x, pooled in ((cache.k, cache.k_pooled), (cache.v, cache.v_pooled)):
        pooled.copy_(heddle.nsa.pool_keys(x, BLOCK))
    steps = [operands(batch, 1, heads, kv_heads) for _ in range(turns)]
    full = torch.full((batch,), length, dtype=torch.int32, device="cuda")

    def sparse(n=0):
        q, k, v, *gates = steps[n % turns]
        cache.lengths.fill_(length - 1)
        return heddle.nsa.nsa_with_cache(q, k, v, cache, *gates, BLOCKS, BLOCK, WINDOW)

    calls = {
        "heddle": sparse,
        "dense": lambda n=0: heddle.attention(
            steps[n % turns][0], cache.k, cache.v, causal="bottom_right", seqused_k=full
        ),
        **peers.fa3_cached([(step[0], cache.k, cache.v) for step in steps], full),
    }

    def expected():
        q, k_last, v_last, *gates = steps[0]
        k, v = (torch.cat([x[:, :-1], last], 1) for x, last in ((cache.k, k_last), (cache.v, v_last)))
        over_all = (sampled(Attention(q, k, v, causal=True)),)
        return dict.fromkeys(calls, over_all) | {"heddle": decoded(q, k, v, gates, BLOCK, BLOCKS, WINDOW)}

    absent = {"fla": "it has no cache of pooled keys"}
    return row(calls, expected, how="graph", rotations=turns, absent=absent)


def of_file(make, window):
    x = captured()
    return make(x, x[0].shape[2], x[1].shape[2], window)


def rows():
    """name -> maker of a Row."""
    out = {}
    for heads, kv_heads in HEADS:
        for window in (0, WINDOW):
            form = f"nsa {heads}/{kv_heads}{f' window {window}' if window else ''}"
            for direction, make in (("forward", forward), ("backward", backward)):
                for length in LENGTHS:
                    name = f"{form} {direction} S{length}"
                    out[name] = functools.partial(make, length, heads, kv_heads, window)
        for preset in ("fast", "seed"):
            for direction in ("forward", "backward"):
                for length in LENGTHS:
                    name = f"nsa {heads}/{kv_heads} window {WINDOW} {preset} {direction} S{length}"
                    out[name] = functools.partial(shared, length, heads, kv_heads, preset, direction)
        out[f"nsa decode B16 {heads}/{kv_heads} 65536"] = functools.partial(decode, 16, 65536, heads, kv_heads)
        out[f"nsa decode B1 {heads}/{kv_heads} 65536"] = functools.partial(decode, 1, 65536, heads, kv_heads)
        for window in (0, WINDOW):
            form = f"{heads}/{kv_heads}{f' window {window}' if window else ''}"
            out[f"nsa memory of forward and backward {form} S65536"] = functools.partial(
                memory, 65536, heads, kv_heads, window
            )
            out[f"nsa memory of forward {form} S65536"] = functools.partial(
                memory, 65536, heads, kv_heads, window, backward=False
            )
    # Against length.
    for length in LENGTHS:
        name = f"nsa memory of forward and backward 64/4 window {WINDOW}"
        out[f"{name} S{length}"] = functools.partial(memory, length, 64, 4, WINDOW)
        for preset in ("fast", "seed"):
            out[f"{name} {preset} S{length}"] = functools.partial(memory_shared, length, 64, 4, preset)
    out["nsa 64/4 fast forward S65536"] = functools.partial(shared, 65536, 64, 4, "fast", "forward", 0, beside_fla=True)
    for direction in ("forward", "backward"):
        name = f"nsa 64/4 window {WINDOW} seed_4_3 {direction} S65536"
        out[name] = functools.partial(shared, 65536, 64, 4, "seed_4_3", direction)
    if TENSORS is not None:
        q, k = captured()[:2]
        form, length = f"nsa {TENSORS.stem} {q.shape[2]}/{k.shape[2]}", q.shape[1]
        for window in (0, WINDOW):
            for direction, make in (("forward", forward_of), ("backward", backward_of)):
                name = f"{form}{f' window {window}' if window else ''} {direction} S{length}"
                out[name] = functools.partial(of_file, make, window)
    return out
