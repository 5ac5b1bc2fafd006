"""heddle.hosts.torch.activate: torch's own attention on the CPU, served by Heddle, and given back."""

import heddle.hosts.torch
import pytest
import torch
from heddle.hosts.torch import activation
from torch.nn.functional import scaled_dot_product_attention

if not hasattr(torch.library, "get_kernel"):
    pytest.skip("this torch does not give its own kernels out", allow_module_level=True)


@pytest.fixture
def calls(monkeypatch):
    """The native functions that the operators call, by name, as they are called."""
    seen, original = [], activation.native

    def native(function, *arguments):
        seen.append(function.__name__)
        return original(function, *arguments)

    monkeypatch.setattr(activation, "native", native)
    return seen


def _operands(dtype=torch.float32, kv_heads=2, keys=9, head_size=8):
    torch.manual_seed(3)
    q = torch.randn(2, 4, 7, head_size, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, keys, head_size, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


def _mask(shape, dtype=torch.float32):
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    mask[..., 2, :] = -torch.inf  # a row that meets no key
    return mask


def _attend(operands, **options):
    out = scaled_dot_product_attention(*operands, enable_gqa=True, **options)
    return out, torch.autograd.grad(out.float().square().sum(), operands)


_OPTIONS = {
    "plain": dict(),
    "causal": dict(is_causal=True),
    "scale": dict(scale=0.3),
    "mask of all": dict(attn_mask=_mask((7, 9))),
    "mask of each": dict(attn_mask=_mask((2, 4, 7, 9))),
    "bool mask": dict(attn_mask=_mask((2, 1, 7, 9)) > 0),
}


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_serves_what_torch_serves(calls, options, dtype, bound):
    options = {name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for name, x in options.items()}
    operands = _operands(dtype)
    expected, wanted = _attend(operands, **options)
    assert calls == []
    with heddle.hosts.torch.activate():
        found, gradients = _attend(operands, **options)
    assert calls == ["attention_forward", "attention_backward"]
    for a, b in zip((found, *gradients), (expected, *wanted)):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert not ((a - b).float().abs().max() > bound * b.float().abs().max())


@pytest.mark.parametrize("forward_ours", [False, True])
def test_either_backward_follows_either_forward(calls, forward_ours):
    operands = _operands()
    mask = _mask((2, 1, 7, 9))
    _, wanted = _attend(operands, attn_mask=mask)
    handle = heddle.hosts.torch.activate() if forward_ours else None
    out = scaled_dot_product_attention(*operands, attn_mask=mask, enable_gqa=True)
    if handle is None:
        handle = heddle.hosts.torch.activate()
    else:
        handle.deactivate()
    gradients = torch.autograd.grad(out.square().sum(), operands)
    handle.deactivate()
    assert calls == (["attention_forward"] if forward_ours else ["attention_backward"])
    for a, b in zip(gradients, wanted):
        assert not ((a - b).abs().max() > 1e-5 * b.abs().max())


def test_gives_torchs_own_back(calls):
    operands = _operands()
    before, _ = _attend(operands)
    with pytest.raises(KeyError), heddle.hosts.torch.activate():
        raise KeyError
    with heddle.hosts.torch.activate() as outer:
        inner = heddle.hosts.torch.activate()
        inner.deactivate()
        inner.deactivate()
        _attend(operands)
        assert len(calls) == 2
        outer.deactivate()
        assert torch.equal(_attend(operands)[0], before)
    assert len(calls) == 2
    assert torch.equal(_attend(operands)[0], before)


def _without_kernel(name):
    q, k, v = _operands()
    q4, k4, v4 = _operands(kv_heads=4)
    if name == "float64":
        return (q.double(), k.double(), v.double()), dict()
    if name == "head size 264":
        return _operands(head_size=264), dict()
    if name == "another head size of value":
        return (q4, k4, torch.cat((v4, v4), -1)), dict()
    if name == "mask with a gradient":
        return (q, k, v), dict(attn_mask=torch.zeros(7, 9, requires_grad=True))
    assert name == "three dimensions"
    return (q4[0], k4[0], v4[0]), dict()


@pytest.mark.parametrize(
    "name",
    ["float64", "head size 264", "another head size of value", "mask with a gradient", "three dimensions"],
)
def test_what_is_not_served_goes_on_as_before(calls, name):
    operands, options = _without_kernel(name)
    expected, wanted = _attend(operands, **options)
    with heddle.hosts.torch.activate():
        found, gradients = _attend(operands, **options)
    assert calls == []
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted))


def test_dropout_goes_on_as_before(calls):
    operands = _operands()

    def run():
        torch.manual_seed(0)
        return scaled_dot_product_attention(*operands, dropout_p=0.5, enable_gqa=True)

    expected = run()
    with heddle.hosts.torch.activate():
        assert torch.equal(run(), expected)
    assert calls == []


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_under_a_compiler(calls, backend):
    operands = _operands()
    expected, wanted = _attend(operands, is_causal=True)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) * 1.0,
        fullgraph=True,
        backend=backend,
    )
    with heddle.hosts.torch.activate():
        found = compiled(*operands)
        gradients = torch.autograd.grad(found.square().sum(), operands)
    assert calls == ["attention_forward", "attention_backward"]
    for a, b in zip((found, *gradients), (expected, *wanted)):
        assert not ((a - b).abs().max() > 1e-5 * b.abs().max())
    compiled(*operands)
    assert len(calls) == 2


@pytest.mark.parametrize("autocast", [False, True])
def test_an_unchanged_model_trains(calls, autocast):
    torch.manual_seed(5)
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )
    x = torch.randn(3, 6, 16)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True

    def run():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x, src_key_padding_mask=padding)[~padding].float().square().mean()
        loss.backward()
        return [x.grad.clone() for x in model.parameters()]

    expected = run()
    with heddle.hosts.torch.activate():
        found = run()
    assert calls.count("attention_forward") == calls.count("attention_backward") == 2
    largest = max(x.abs().max() for x in expected)
    for a, b in zip(found, expected):
        assert not ((a - b).abs().max() > (0.05 if autocast else 1e-5) * largest)


def test_under_vmap(calls):
    q, k, v = (x.detach() for x in _operands(kv_heads=4))
    stack = [torch.stack((x, 2 * x)) for x in (q, k, v)]
    attend = torch.vmap(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))
    expected = attend(*stack)
    with heddle.hosts.torch.activate():
        found = attend(*stack)
    assert not ((found - expected).abs().max() > 1e-5 * expected.abs().max())


def test_says_what_a_torch_lacks(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(
        RuntimeError, match="has no torch.library.get_kernel, by which its own kernels stay within reach"
    ):
        heddle.hosts.torch.activate()
