"""An unchanged diffusers model, by its "native" attention backend, on Heddle."""

import heddle.hosts.torch
import pytest
import torch
from flash_kit import close, native_calls

diffusers = pytest.importorskip("diffusers")

if not hasattr(torch.library, "get_kernel"):
    pytest.skip("this torch does not give its own kernels out", allow_module_level=True)


def _transformer():
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    model.set_attention_backend("native")
    inputs = dict(
        hidden_states=torch.randn(1, 16, 4),
        encoder_hidden_states=torch.randn(1, 7, 32),
        pooled_projections=torch.randn(1, 32),
        timestep=torch.tensor([0.5]),
        img_ids=torch.randn(16, 3),
        txt_ids=torch.zeros(7, 3),
    )
    return model, inputs, 3


def _unet():
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
    )
    inputs = dict(
        sample=torch.randn(2, 4, 8, 8),
        timestep=torch.tensor(3),
        encoder_hidden_states=torch.randn(2, 5, 16),
    )
    return model, inputs, 8  # four transformers, each with attention to itself and across


@pytest.mark.parametrize("make", [_transformer, _unet])
def test_trains_unchanged(monkeypatch, make):
    model, inputs, layers = make()

    def run():
        out = model(**inputs, return_dict=False)[0]
        parameters = [x for x in model.parameters() if x.requires_grad]
        return out, torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)

    expected, wanted = run()
    with native_calls(monkeypatch) as calls:
        with heddle.hosts.torch.activate():
            found, gradients = run()
        assert calls == ["attention_forward"] * layers + ["attention_backward"] * layers
    close(found, expected, 1e-5)
    largest = max(float(x.abs().max()) for x in wanted if x is not None)
    for a, b in zip(gradients, wanted):
        if b is not None:
            assert (a - b).abs().max() <= 1e-5 * largest
