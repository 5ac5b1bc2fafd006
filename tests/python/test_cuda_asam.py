"""Adaptive sparse attention on a GPU: in 16 bits, against the CPU in float32 on the same numbers."""

import itertools

import pytest
import torch
from asam_kit import layer, relative
from heddle import _heddle, nn
from heddle.nn.asam.adaptive import Adaptive

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)
if not _heddle.cuda_built():
    pytest.skip("this build of heddle has no GPU kernels", allow_module_level=True)

LIMIT = 2e-2  # of a norm: o and its gradients are rounded to bfloat16 on the way through parts and their merge
OF_PARAMETERS = 5e-2  # whose gradients are sums that nearly cancel
FORMS = [
    {"pattern_type": name, "gate": gate, "causal": causal}
    for (name, gate), causal in itertools.product(
        [("adaptive", "hard"), ("adaptive", "soft"), ("clustered", "soft"), ("hierarchical", "hard")], [False, True]
    )
]


def attended(device, dtype, form, gradients):
    """o and gradients of one call, by name."""
    made = layer(block_size=64, window_size=128, num_random=64, **form).to(device)
    if form["pattern_type"] == "adaptive":
        with torch.no_grad():
            made.selection.head_bias.copy_(torch.eye(4) * 3)  # every pattern is some head's
    make = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=make).bfloat16().to(device)
    q, k, v, d_o = (draw(2, 500, 4, 8).to(dtype).requires_grad_(gradients) for _ in range(4))
    scores = made.adaptive_attn.gate.scores(draw(2, 500, 32).float())
    lengths = torch.tensor([500, 333], dtype=torch.int32, device=device)
    with torch.set_grad_enabled(gradients):
        call = Adaptive(made.selection, q, k, v, scores, 1.0, lengths)
        o = call()
    found = {"o": o, "tiles": call.attended()}
    if gradients:
        o.backward(d_o.detach())
        found |= {"dq": q.grad, "dk": k.grad, "dv": v.grad}
        named = dict(made.named_parameters())
        of = (
            "adaptive_attn.gate.sparse_threshold",
            "selection.head_bias",
            "selection.centroids",
            "selection.scale_weights",
        )
        found |= {name: named[name].grad for name in of if name in named and named[name].grad is not None}
    return {name: x.detach().cpu() for name, x in found.items()}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
@pytest.mark.parametrize("gradients", [True, False])
def test_a_gpu_attends_as_a_cpu(form, gradients):
    here = attended("cuda", torch.bfloat16, form, gradients)
    there = attended("cpu", torch.float32, form, gradients)
    assert here.keys() == there.keys() and torch.equal(here["tiles"], there["tiles"])
    for name, x in here.items():
        if there[name].double().norm() > 1e-2:  # below, what is left is rounding
            assert relative(x, there[name]) < (OF_PARAMETERS if "." in name else LIMIT), name


@pytest.mark.parametrize("pattern", ["adaptive", "hierarchical"])
def test_later_tokens_move_no_earlier_bit(pattern):
    made = layer(pattern_type=pattern, causal=True, block_size=64).cuda().bfloat16()
    x = torch.randn(1, 500, 32, device="cuda", dtype=torch.bfloat16)
    changed = x.clone()
    changed[:, 260:] = torch.randn(1, 240, 32, device="cuda", dtype=torch.bfloat16)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            one, two = made(x)[0], made(changed)[0]
        assert torch.equal(one[:, :260], two[:, :260]) and not torch.equal(one[:, 260:], two[:, 260:])


def test_an_encoder_trains_under_autocast():
    torch.manual_seed(0)
    config = nn.ASAMConfig(dim=64, num_heads=4, dim_head=16, causal=True, dropout=0.0, use_gradient_checkpointing=True)
    made = nn.ASAMEncoder(config, 2).cuda()
    x = torch.randn(2, 500, 64, device="cuda")
    steps, scaler = torch.optim.AdamW(made.parameters(), 3e-3), torch.amp.GradScaler("cuda")
    losses = []
    for _ in range(10):
        with torch.autocast("cuda", torch.float16):
            loss = (made(x) - x.roll(1, 1) / 2).square().mean()
        steps.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(steps)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
