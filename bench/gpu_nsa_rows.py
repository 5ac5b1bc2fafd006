"""What `make bench-gpu` times of native sparse attention (docs/nsa.md): the whole operation, forward and backward, beside
flash-linear-attention's and beside dense attention; its parts; ways of sharing; decoding; memory.

Dense attention computes something else, so its outputs are not compared; those of native sparse attention are, over lists that
all are given, with the naive functions in float64: gradients and few keys once for each form at 2048 keys, forwards of more keys
at their own number, in the last rows.
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
from gpu_backward_rows import both, gradients
from gpu_reference import distance
from gpu_rows import Row, random

SIZE, BLOCK, BLOCKS, WINDOW = 128, 64, 16, 512
FEW = (
    8192 * 32
)  # rows of all heads; of no more, compressed branch and gated sum take under 100 us, and are timed in graphs
LENGTHS = (8192, 16384, 32768, 65536)
HEADS = ((64, 4), (32, 8))
CHECKED, LAST = 2048, 64  # keys; rows that are compared where there are more keys
# Of results' and gradients' norms, in bf16: probabilities, branches and results are each rounded.
LIMIT = 0.03
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


@functools.cache
def agreement(
    heads: int, kv_heads: int, window: int, backward: bool, preset: str | None = None, length: int = CHECKED
) -> dict[str, float]:
    """contender -> its largest distance from the naive functions in float64, over the same lists, at two key/value heads."""
    group, length = heads // kv_heads, CHECKED if backward else max(length, CHECKED)
    sharing = heddle.nsa.presets(group)[preset] if preset else {}
    prepared = leaves if backward else list  # a graph of so many keys would take the GPU's memory
    x = prepared(without_window(operands(1, length, 2 * group, 2), window))
    with torch.no_grad():
        lists = heddle.nsa.select_blocks(x[0], heddle.nsa.pool_keys(x[1], BLOCK), BLOCKS, block_size=BLOCK)
    rows = slice(length - LAST if length > CHECKED else 0, None)
    wide = prepared([None if y is None else y.double() for y in x])
    q, k, v, g_cmp, g_slc, g_swa = (y if y is None or n in (1, 2) else y[:, rows] for n, y in enumerate(wide))
    exact = heddle.nsa.naive_nsa(q, k, v, g_slc, g_swa, lists[:, rows], BLOCKS, BLOCK, window, **sharing)
    compressed = heddle.nsa.naive_nsa_compression(q, k, v, g_cmp, BLOCKS, BLOCK)[1]
    if "cmp" in sharing.get("share_branches", ()):  # copied from anchors, with their gates
        assert sharing["gate"] == "anchor"
        stride = sharing["query_stride"]
        compressed = compressed[:, ::stride].repeat_interleave(stride, 1)[:, : exact.shape[1]]
    exact = exact + compressed
    weight = random(*exact.shape)
    expected = [exact.detach()]
    if backward:
        expected += torch.autograd.grad(exact, there(wide), weight.double())
    found = {}
    calls = {"heddle": lambda: mine(x, window, lists, **sharing)}
    if not preset:
        calls |= fla(x, window, lists.long())
    for name, call in calls.items():
        try:
            o = call()
            outputs = [o.detach()[:, rows], *(torch.autograd.grad(o, there(x), weight) if backward else ())]
        except Exception as error:  # another's, whatever it is: outputs_of() says of the timed call
            if name == "heddle":
                raise
            print(f"fla at {CHECKED} keys, {heads} / {kv_heads} heads: {type(error).__name__}: {error}"[:300])
            found[name] = float("nan")
            continue
        distances = [distance(a, b) for a, b in zip(outputs, expected, strict=True)]
        found[name] = next((d for d in distances if not d <= LIMIT), max(distances))
    return found


@functools.cache
def cache_agreement(heads: int, kv_heads: int) -> dict[str, float]:
    """Of a step of decoding, over all blocks."""
    group = heads // kv_heads
    x = operands(2, CHECKED, 2 * group, 2)
    cache = heddle.nsa.Cache(2, CHECKED, 2, SIZE, block=BLOCK, dtype=x[0].dtype, device="cuda")
    rows = slice(CHECKED - 1, CHECKED)
    with torch.no_grad():
        cache.append(x[1][:, :-1], x[2][:, :-1])
        last = [y[:, rows] for y in x]
        every = CHECKED // BLOCK
        o = heddle.nsa.nsa_with_cache(*last[:3], cache, *last[3:], every, BLOCK, WINDOW)
        q, g_cmp, g_slc, g_swa = (last[n].double() for n in (0, 3, 4, 5))
        k, v = x[1].double(), x[2].double()
        expected = heddle.nsa.naive_nsa_with_compression(q, k, v, g_cmp, g_slc, g_swa, every, BLOCK, WINDOW)
    return {"heddle": distance(o, expected)}


def row(calls, agrees, window=0, **more):
    about = {"work": 1, "unit": "calls/s", "limit": LIMIT, "kernel": "nsa", "sources": sources.NSA_GPU}
    absent = {} if "fla" in calls or "fla" in more.get("absent", {}) else {"fla": peers.why_no_fla(window)}
    return Row(calls, agreement=agrees, **{**about, **more, "absent": {**absent, **more.get("absent", {})}})


def dense(q, k, v):
    """Heddle's, and FlashAttention-3."""
    calls = {"dense": lambda: heddle.attention(q, k, v, causal="bottom_right")}
    return calls | peers.fa3_dense(q, k, v, causal=True)


def forwards(x, window):
    return {"heddle": lambda: mine(x, window), **fla(x, window), **dense(*x[:3])}


def forward_of(x, heads, kv_heads, window, **more):
    x = without_window(x, window)
    agrees = functools.partial(agreement, heads, kv_heads, window, False, length=x[0].shape[1])
    return row(forwards(x, window), agrees, window, **more)


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
    return row(calls, functools.partial(agreement, heads, kv_heads, window, True), window, absent=absent, **more)


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
    agrees = functools.partial(agreement, heads, kv_heads, window, direction == "backward", preset, length)
    if not beside_fla:
        return row(calls, agrees, absent={"fla": "it has no sharing"}, **more)
    return row(
        {**calls, **fla(x, window)},
        lambda: agreement(heads, kv_heads, window, False, length=length) | agrees(),
        window,
        **more,
    )


PARTS = ("pooled keys", "compressed", "selection", "selected", "window")


def part(length, heads, kv_heads, name, direction):
    """One step of the operation, as parallel_nsa calls it."""
    x = operands(1, length, heads, kv_heads)
    if direction == "backward":
        x = leaves(x)
    q, k, v = x[:3]
    with torch.no_grad():
        k_pooled, v_pooled = (heddle.nsa.pool_keys(y, BLOCK) for y in (k, v))
        compressed = {"causal": "top_left", "key_offset": BLOCK - 1, "key_step": BLOCK, "return_lse": True}
        lse = heddle.attention(q, k_pooled, v_pooled, **compressed)[1]
        lists = heddle.nsa.select_blocks(q, k_pooled, BLOCKS, lse=lse, block_size=BLOCK)
    if direction == "backward":
        k_pooled, v_pooled = leaves((k_pooled, v_pooled))
    call, of = {
        "pooled keys": (lambda: heddle.nsa.pool_keys(k, BLOCK), [k]),
        "compressed": (lambda: heddle.attention(q, k_pooled, v_pooled, **compressed)[0], [q, k_pooled, v_pooled]),
        "selection": (lambda: heddle.nsa.select_blocks(q, k_pooled, BLOCKS, lse=lse, block_size=BLOCK), None),
        "selected": (
            lambda: heddle.sparse_attention(q, k, v, lists, block_size=BLOCK, causal="bottom_right"),
            [q, k, v],
        ),
        "window": (
            lambda: heddle.attention(q, k, v, causal="bottom_right", window=(WINDOW - 1, None)),
            [q, k, v],
        ),
    }[name]
    if direction == "backward":
        call = gradients(call, of)
    agrees = functools.partial(agreement, heads, kv_heads, WINDOW, direction == "backward")
    few = length * heads <= FEW and name == "compressed"
    how = "graph" if direction == "forward" and (name == "pooled keys" or few) else "queued"
    return row({"heddle": call}, agrees, how=how, absent={"fla": "a part"})


def gates(length, heads, kv_heads, direction):
    """The gated sum of three branches."""
    os = [random(1, length, heads, SIZE) for _ in range(3)]
    scale = [torch.rand(1, length, heads, device="cuda") for _ in range(3)]
    if direction == "backward":
        os, scale = leaves(os), leaves(scale)
    call = lambda: torch.ops.heddle.gate_branches(os, scale)  # noqa: E731
    if direction == "backward":
        call = gradients(call, [*os, *scale])
    agrees = functools.partial(agreement, heads, kv_heads, WINDOW, direction == "backward")
    how = "graph" if direction == "forward" and length * heads <= FEW else "queued"
    return row({"heddle": call}, agrees, how=how, absent={"fla": "a part"})


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
    agrees = functools.partial(cache_agreement, heads, kv_heads)
    return row(calls, agrees, how="graph", rotations=turns, absent={"fla": "it has no cache of pooled keys"})


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
        for direction in ("forward", "backward"):
            for length in (8192, 65536):
                for name in PARTS:
                    if name == "selection" and direction == "backward":
                        continue
                    title = f"nsa part {name} {heads}/{kv_heads} {direction} S{length}"
                    out[title] = functools.partial(part, length, heads, kv_heads, name, direction)
                title = f"nsa part gates {heads}/{kv_heads} {direction} S{length}"
                out[title] = functools.partial(gates, length, heads, kv_heads, direction)
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
