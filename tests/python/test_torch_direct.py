"""The call past the dispatcher with its gradients: the operators' bits, and everything that autograd may ask of it."""

import heddle
import pytest
import torch
from heddle import flash_attn
from heddle._options import INDEX
from heddle.hosts.torch import direct
from torch.utils.checkpoint import checkpoint

BY_OPERATOR = torch.ops.heddle.attention_forward.default


def tensors(B=2, S=9, H=4, Hkv=2, D=8, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(B, S, h, D, generator=random).to(dtype).requires_grad_() for h in (H, Hkv, Hkv)]


def options(name):
    random = torch.Generator().manual_seed(1)
    cu = torch.tensor([0, 4, 18], dtype=torch.int32)
    return {
        "plain": dict,
        "causal": lambda: {"causal": "bottom_right", "window": (3, -1), "softcap": 2.0},
        "bias and sink": lambda: {
            "bias": torch.randn(4, 1, 9, generator=random).requires_grad_(),
            "sink": torch.randn(4, generator=random).requires_grad_(),
        },
        "mask": lambda: {"mask": torch.rand(2, 1, 1, 9, generator=random) > 0.4, "alibi_slopes": torch.rand(4)},
        "dropout": lambda: {"dropout_p": 0.3, "dropout_seed": 12},
        "packed": lambda: {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 14, "max_seqlen_k": 14},
    }[name]()


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Sends calls through the operators, and notes which."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def run(inputs, chosen, with_lse):
    """Results and gradients of everything that has one."""
    leaves = [x for x in (*inputs, *chosen.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    out = heddle.attention(*inputs, **chosen, return_lse=with_lse)
    results = list(out) if with_lse else [out]
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x.dtype) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, weights)]


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", ["plain", "causal", "bias and sink", "mask", "dropout", "packed"])
def test_same_bits_as_the_operators(name, with_lse):
    inputs, chosen = tensors(), options(name)
    if name == "packed":
        inputs = [x.detach().flatten(0, 1).requires_grad_() for x in inputs]
    found = run(inputs, chosen, with_lse)
    with Seen() as seen:
        expected = run(inputs, chosen, with_lse)
    assert {"heddle.attention_forward.default", "heddle.attention_backward.default"} <= set(seen.names)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride()


def test_nothing_passes_the_dispatcher(monkeypatch):
    """What is timed is what is meant: with a gradient, too, no operator is called."""

    def called(*arguments):
        raise AssertionError("an operator was called")

    monkeypatch.setattr(heddle.hosts.torch.functional, "_forward_operator", called)
    monkeypatch.setattr(direct, "backward_operator", called)
    q, k, v = tensors()
    run((q, k, v), options("bias and sink"), True)
    x = q.detach().transpose(1, 2).requires_grad_()
    heddle.sdpa(x, x, x, dropout_p=0.5).sum().backward()
    flash_attn.flash_attn_func(q, k, v, causal=True).sum().backward()


def test_gradients_lie_as_their_tensors():
    q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors(Hkv=4))
    gradients = torch.autograd.grad(heddle.sdpa(q, k, v).square().sum(), (q, k, v))
    assert all(g.stride() == x.stride() for g, x in zip(gradients, (q, k, v)))
    packed = torch.randn(2, 9, 3, 4, 8, requires_grad=True)
    heddle.attention(*packed.unbind(2)).square().sum().backward()
    parts = [x.detach().clone().requires_grad_() for x in packed.unbind(2)]
    heddle.attention(*parts).square().sum().backward()
    torch.testing.assert_close(packed.grad, torch.stack([x.grad for x in parts], 2))


def test_sdpa_of_eight_bits(monkeypatch):
    monkeypatch.setenv("HEDDLE_KERNEL", "reference")  # on a CPU none other takes it
    q, k, v = (x.detach().transpose(1, 2).to(torch.float8_e4m3fn) for x in tensors(Hkv=4))
    out = heddle.sdpa(q, k, v)
    expected = heddle.attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert out.dtype == torch.bfloat16 and torch.equal(out.transpose(1, 2), expected)


def test_only_what_is_needed_is_computed(monkeypatch):
    asked = []
    native = direct.native

    def recorded(function, *arguments, **rest):
        if function is direct._heddle.attention_backward:
            asked.append([x is not None for x in arguments[7:12]])
        return native(function, *arguments, **rest)

    monkeypatch.setattr(direct, "native", recorded)
    q, k, v = tensors()
    heddle.attention(q.detach(), k, v.detach()).sum().backward()
    assert asked == [[False, True, False, False, False]] and k.grad is not None


def test_in_place_changes_of_saved_tensors_are_refused():
    q, k, v = tensors()
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    for change in (q.detach(), mask):
        out = heddle.attention(q * 1, k, v, mask=mask) if change is mask else heddle.attention(q, k, v)
        with torch.no_grad():
            change.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out = heddle.attention(q, k, v)
        out.sum().backward()
        out.sum().backward()


def test_the_result_may_be_changed_in_place():
    q, k, v = tensors()
    for function in (heddle.attention, heddle.sdpa):
        function(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)).mul_(2).detach()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_second_derivatives_and_batched_gradients():
    q, k, v = tensors()
    (dq,) = torch.autograd.grad(heddle.attention(q, k, v, dropout_p=0.2, dropout_seed=5).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dq.sum().backward()
    for out in (heddle.attention(q, k, v), heddle.sdpa(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))):
        weights = torch.randn(3, *out.shape)
        looped = [torch.autograd.grad(out, q, w, retain_graph=True)[0] for w in weights]
        (batched,) = torch.autograd.grad(out, q, weights, is_grads_batched=True)
        torch.testing.assert_close(batched, torch.stack(looped))


def test_hooks_see_what_is_saved():
    saved = []
    q, k, v = tensors()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        heddle.attention(q, k, v).sum().backward()
    assert saved == [q.shape, k.shape, v.shape, q.shape, (2, 4, 9)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["causal", "dropout"])
def test_checkpointing(name, reentrant):
    chosen = options(name)
    chosen.pop("dropout_seed", None)  # drawn: the mask has to be drawn again
    q, k, v = tensors()

    def block(q, k, v):
        return heddle.attention(q * 2, k, v, **chosen).sin()

    torch.manual_seed(3)
    expected = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    torch.manual_seed(3)
    found = (
        torch.autograd.grad(checkpoint(block, q, k, v, use_reentrant=reentrant).sum(), (q, k, v))
        if not reentrant
        else None
    )
    if reentrant:  # autograd.grad() is not for it
        checkpoint(block, q, k, v, use_reentrant=True).sum().backward()
        found = q.grad, k.grad, v.grad
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_profiler_names_both_directions():
    q, k, v = tensors()
    with torch.profiler.profile() as profile:
        heddle.attention(q, k, v).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert "heddle::attention_forward" in names and "_AttentionBackward" in names


def test_deterministic_follows_torch(monkeypatch):
    seen = []
    native = direct.native

    def recorded(function, *arguments, **rest):
        seen.append(next(x for x in arguments if isinstance(x, tuple))[INDEX["deterministic"]])
        return native(function, *arguments, **rest)

    monkeypatch.setattr(direct, "native", recorded)
    q, k, v = tensors(Hkv=4)

    def modes():
        seen.clear()
        for call in (
            lambda: heddle.attention(q, k, v),
            lambda: heddle.attention(q, k, v, deterministic=True),
            lambda: heddle.attention(q, k, v, deterministic=False),
            lambda: heddle.sdpa(q, k, v),
            lambda: flash_attn.flash_attn_func(q, k, v),
            lambda: flash_attn.flash_attn_func(q, k, v, deterministic=True),
        ):
            call().sum().backward()
        assert seen[::2] == seen[1::2]  # forward and backward
        return seen[::2]

    assert modes() == [False, True, False, False, False, True]
    torch.use_deterministic_algorithms(True)
    try:
        assert modes() == [True, True, False, True, True, True]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_for_torch(dtype):
    q, k, v = tensors(Hkv=4)
    bias = torch.randn(9, 9, requires_grad=True)
    with torch.autocast("cpu", dtype):
        out = heddle.attention(q, k, v, bias=bias)
        theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        assert out.dtype == theirs.dtype == dtype
        assert heddle.sdpa(q, k, v).dtype == dtype
        narrow = heddle.attention(q, k, v, bias=bias.detach().to(torch.bfloat16))
        assert narrow.dtype == dtype
        with torch.autocast("cpu", enabled=False):
            assert heddle.attention(q, k, v).dtype == torch.float32
        with pytest.raises(ValueError, match="q is float64"):
            heddle.attention(q.double(), k.double(), v.double())
    out.float().sum().backward()
    low = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    again = bias.detach().requires_grad_()
    expected = heddle.attention(*low, bias=again)
    expected.float().sum().backward()
    assert torch.equal(out, expected)
    for x, y in zip((q, k, v, bias), (*low, again)):
        assert x.grad.dtype == torch.float32 and torch.equal(x.grad, y.grad.float())


def test_compiled_under_autocast_and_deterministic_algorithms():
    def step(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return heddle.attention(q, k, v, causal="top_left").float().square().sum()

    q, k, v = tensors()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(step(q, k, v), (q, k, v))
    torch.testing.assert_close(torch.autograd.grad(compiled(q, k, v), (q, k, v)), expected)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(torch.autograd.grad(compiled(q, k, v), (q, k, v)), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_backward_under_compiled_autograd():
    q, k, v = tensors()
    expected = torch.autograd.grad(heddle.attention(q, k, v, causal="top_left").square().sum(), (q, k, v))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        heddle.attention(q, k, v, causal="top_left").square().sum().backward()
    for x, y in zip((q, k, v), expected):
        torch.testing.assert_close(x.grad, y)


def test_empty_inputs_have_empty_gradients():
    for shape in ((0, 9, 4, 8), (1, 0, 4, 8)):
        x = torch.randn(shape, requires_grad=True)
        heddle.attention(x, x, x).sum().backward()
        assert x.grad.shape == shape
