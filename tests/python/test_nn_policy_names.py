"""Names in policies and importance that no layer has: refused, since nothing would be done without a word."""

import pytest
import torch
from heddle import lowbit, nn


def model():
    torch.manual_seed(0)
    blocks = [torch.nn.ModuleDict({"q_proj": torch.nn.Linear(64, 64), "act": torch.nn.ReLU()}) for _ in range(3)]
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(blocks), "lm_head": torch.nn.Linear(64, 32)}).eval()


def formats(module):
    return {
        name: getattr(found, "format", "torch")
        for name, found in module.named_modules()
        if hasattr(found, "in_features")
    }


BAD = {
    "misspelt": (
        {"layers.*.q_porj": "nvfp4"},
        r"pattern 'layers\.\*\.q_porj' matches no layer: names are 'layers.0.q_proj', ",
    ),
    "one of two": ({"*.q_proj": "nvfp4", "head": "int8_row"}, "pattern 'head' matches no layer: names are"),
    "no layer": ({"layers.0.act": "nvfp4", "*": "int8_row"}, "pattern 'layers.0.act' matches no layer"),
    "shadowed": (
        [("*", "nvfp4"), ("lm_head", "float32")],
        "pattern 'lm_head' decides over no layer: patterns before it match",
    ),
    "brackets": ({"layers.[3-9].q_proj": "nvfp4"}, r"pattern 'layers.\[3-9\].q_proj' matches no layer"),
}


@pytest.mark.parametrize("name", BAD)
def test_patterns_that_decide_over_nothing(name):
    policy, words = BAD[name]
    m = model()
    with pytest.raises(ValueError, match=rf"\[quantize_model\] policy: {words}"):
        nn.quantize_model(m, policy)
    assert set(formats(m).values()) == {"torch"}  # nothing has been replaced
    with pytest.raises(ValueError, match=rf"\[calibrate\] policy: {words}"):
        nn.calibrate(m, torch.randn(4, 64), policy)


def test_modules_without_layers():
    with pytest.raises(ValueError, match=r"pattern '\*' matches no layer: the module has no linear layer in floats"):
        nn.quantize_model(torch.nn.ReLU(), "nvfp4")
    m = nn.quantize_model(model(), "nvfp4")
    with pytest.raises(ValueError, match="the module has no linear layer in floats"):
        nn.quantize_model(m, "int8_row")


def test_one_format_takes_the_head_too():
    """As its docstring says, and as quantize_checkpoint does not."""
    assert set(formats(nn.quantize_model(model(), "nvfp4")).values()) == {"nvfp4"}
    kept = formats(nn.quantize_model(model(), {"lm_head": "float32", "*": "nvfp4"}))
    assert kept.pop("lm_head") == "torch" and set(kept.values()) == {"nvfp4"}
    assert not lowbit.linear_layer("lm_head")


def test_patterns_are_the_shells():
    found = formats(nn.quantize_model(model(), {"layers.[01].*": "nvfp4", "layers.[!01].q_proj": "int8_row"}))
    assert found == {
        "layers.0.q_proj": "nvfp4",
        "layers.1.q_proj": "nvfp4",
        "layers.2.q_proj": "int8_row",
        "lm_head": "torch",
    }
    # A module alone has no name.
    assert nn.quantize_model(torch.nn.Linear(64, 32), {"": "nvfp4"}).format == "nvfp4"
    # What choose_policy returns names each layer, brackets and all.
    odd = torch.nn.ModuleDict({"a[0]": torch.nn.Linear(64, 64), "a0": torch.nn.Linear(64, 64)})
    odd.forward = lambda x: odd["a0"](odd["a[0]"](x))
    report = nn.choose_policy(odd.eval(), torch.randn(16, 64), error=0.5)
    assert [pattern for pattern, _ in report.policy.rules] == ["a[[]0]", "a0"]
    nn.quantize_model(odd, report.policy)


def test_importance_of_what_is_no_layer():
    m = model()
    columns = torch.rand(64)
    with pytest.raises(
        ValueError, match=r"\[quantize_model\] importance has 'typo', which is no linear layer: names are"
    ):
        nn.quantize_model(m, "nvfp4", importance={"layers.0.q_proj": columns, "typo": columns})
    assert set(formats(m).values()) == {"torch"}
    # Of a layer that stays as it is nothing is said.
    nn.quantize_model(m, {"layers.*": "nvfp4"}, importance={"layers.0.q_proj": columns, "lm_head": columns})
    plain = nn.quantize_model(model(), {"layers.*": "nvfp4"})
    assert not torch.equal(m["layers"][0]["q_proj"].codes, plain["layers"][0]["q_proj"].codes)
    assert torch.equal(m["layers"][1]["q_proj"].codes, plain["layers"][1]["q_proj"].codes)


def test_what_is_no_policy_and_no_state():
    state = nn.quantize_model(model(), "nvfp4").state_dict()
    for match, error, call in [
        (r"\[Policy\] scale_rule is 'msee': it must be one of plain", ValueError, lambda: nn.Policy("nvfp4", scale_rule="msee")),
        (r"\[Policy\] rules is 7: it must be a mapping or pairs", TypeError, lambda: nn.Policy(7)),
        (r"\[Policy\] a pattern is 3: it must be a string", TypeError, lambda: nn.Policy({3: "nvfp4"})),
        (r"\[Policy\] format is 3: it must be the name of one", TypeError, lambda: nn.quantize_model(model(), {"*": 3})),
        (r"\[load_quantized\] module is a NoneType", TypeError, lambda: nn.load_quantized(None, state)),
        (r"\[load_quantized\] state is a ModuleDict: it must be a mapping", TypeError, lambda: nn.load_quantized(model(), model())),
        (r"\[load_quantized\] state is a str: it must be a mapping", TypeError, lambda: nn.load_quantized(model(), "model.pt")),
        (r"\[load_quantized\] state is a NoneType: it must be a mapping", TypeError, lambda: nn.load_quantized(model(), None)),
        (r"lm_head.: a state of \\xff+\\xff.* it must be one of nvfp4", RuntimeError, lambda: nn.load_quantized(model(), {**state, "lm_head.format_name": torch.full((2,), 255, dtype=torch.uint8)})),
        (r"\[load_quantized\] state has a str for 'lm_head.format_name'", TypeError, lambda: nn.load_quantized(model(), dict.fromkeys(state, "x") | {"layers.0.q_proj.format_name": state["lm_head.format_name"], "layers.1.q_proj.format_name": state["lm_head.format_name"], "layers.2.q_proj.format_name": state["lm_head.format_name"]})),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            call()
