"""The types of the public functions, as a type checker sees them, and the lists of names in them, which the library has too."""

import importlib
import inspect
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import heddle
import numpy as np
import pytest
import torch
from heddle import _heddle, _options, _types, lowbit, nn
from heddle.lowbit import calibration
from heddle.nn import block, native_sparse_attention, policy
from heddle.nn.asam import config as asam_config
from heddle.nsa import branches, cache, sharing

_CASES = Path(__file__).with_name("typing_cases.py")
_ROOT = Path(__file__).parents[2]


def names(alias):
    """The strings of an alias, in their order."""
    if get_origin(alias) is Literal:
        return list(get_args(alias))
    return [name for part in get_args(alias) for name in names(part)]


def test_options_are_those_of_attention():
    parameters = list(inspect.signature(heddle.attention).parameters)
    assert sorted(_types.AttentionOptions.__annotations__) == sorted(set(parameters) - {"q", "k", "v", "return_lse"})
    # What explain() packs is all but where results go.
    assert _types.AttentionOptions.__annotations__.keys() - _types.QuestionOptions.__annotations__.keys() == {
        "out",
        "lse_out",
    }


def test_options_over_caches_are_all_but_what_the_cache_says():
    every = _types.QuestionOptions.__annotations__.keys()
    cached = _types.CacheOptions.__annotations__.keys()
    assert every - cached == {"cu_seqlens_q", "cu_seqlens_k", "seqused_k"} and cached < every
    assert cached - _types.Int4CacheOptions.__annotations__.keys() == {"page_table", "cache_batch_idx"}


def test_options_of_linear_are_those_of_from_linear():
    keywords = inspect.signature(nn.Linear._shell).parameters
    assert list(_types.LinearOptions.__annotations__) == [p for p in keywords if keywords[p].kind == 3]


@pytest.mark.parametrize(
    "alias, listed",
    [
        (_types.CausalName, list(_heddle.codes()["causal"])),
        (_types.CausalName, [corner.value for corner in heddle.Causal]),
        (_types.PrecisionName, list(_heddle.codes()["precision"])),
        (_types.RuleName, list(lowbit.RULES)),
        (_types.ActivationName, list(lowbit.ACTIVATIONS)),
        (_types.NormName, list(lowbit.NORMS)),
        (_types.BlockNormName, list(block._NORMS)),
        (_types.CalibrationMethod, list(calibration.METHODS)),
        (_types.ShareName, list(sharing.SHARES)),
        (_types.BranchName, list(sharing.BRANCHES)),
        (_types.GateName, list(sharing.GATES)),
        (_types.OwnKeyName, list(cache.OWN_KEYS)),
        (_types.CompressionName, list(native_sparse_attention.COMPRESSIONS)),
        (_types.ForcedName, list(branches.FORCED)),
        (_types.ASAMPatternName, list(asam_config.PATTERNS)),
        (_types.ASAMGateName, list(asam_config.GATES)),
    ],
)
def test_names_are_the_librarys(alias, listed):
    assert names(alias) == listed


def accepted(words, takes):
    found = []
    for word in words:
        try:
            takes(word)
        except ValueError:
            continue
        found.append(word)
    return found


def test_names_of_formats():
    sizes = [f"{name}_b{2**n}" for name in ("nf4", "fp4_bnb") for n in range(3, 15)]
    given = [*lowbit.FORMATS, *sizes, "int4_g16", "nvfp5", "fp8"]
    assert accepted(given, lambda name: _heddle.lowbit_storage(name, 4, 8192)) == names(_types.FormatName)
    rounded = [
        f"{name}{x}"
        for x in ("", "+int8_x", "+fp8_x")
        for name in (*names(_types.FormatName), "float32", "16bit", "8bit")
    ]
    assert sorted(accepted(rounded, policy.check_format)) == sorted(names(_types.PolicyName))


def quoted(text):
    return re.findall(r"'(\w+)'", text)


def test_names_that_the_library_lists_in_its_refusals():
    shape, x = (1, 4, 2, 8), np.zeros((1, 4, 2, 8), np.float32)

    def refusal(call):
        with pytest.raises(ValueError) as refused:
            call()
        return str(refused.value)

    assert quoted(refusal(lambda: heddle.attention(x, x, x, method="x")))[1:] == names(_types.MethodName)
    gpus = refusal(lambda: heddle.explain(shape, shape, shape, gpu="x")).partition("one of ")[2]
    assert gpus.split(", ") == names(_types.GpuName)
    assert quoted(refusal(lambda: lowbit.load(".", "x", framework="x")))[1:] == names(_types.FrameworkName)
    orders = refusal(lambda: _heddle.lowbit_packed_bytes("nvfp4", 16, 32, False, "x")).partition("one of ")[2]
    assert orders.split(", ") == [*names(_types.OrderName), "dense"]  # which pack() refuses: it is no packed order
    floats = quoted(refusal(lambda: heddle.explain(shape, shape, shape, dtype="x")))[1:]
    assert sorted(names(_types.FloatName)) == sorted([*floats, *_options._SHORT])
    given = [*names(_types.FloatName), "half", "float64"]
    assert accepted(given, lambda name: _options.wants_float32("attention", name)) == names(_types.Float32Name)


OVERLOADED = [
    ("heddle", "attention", 3),
    ("heddle", "sparse_attention", 3),
    ("heddle", "attention_with_kv_cache", 3),
    ("heddle.flash_attn", "flash_attn_func", 3),
    ("heddle.flash_attn", "flash_attn_kvpacked_func", 3),
    ("heddle.flash_attn", "flash_attn_qkvpacked_func", 3),
    ("heddle.flash_attn", "flash_attn_varlen_func", 3),
    ("heddle.flash_attn", "flash_attn_varlen_kvpacked_func", 3),
    ("heddle.flash_attn", "flash_attn_varlen_qkvpacked_func", 3),
    ("heddle.flash_attn", "flash_attn_with_kvcache", 3),
    ("heddle.flash_attn_3", "flash_attn_func", 3),
    ("heddle.flash_attn_3", "flash_attn_qkvpacked_func", 3),
    ("heddle.flash_attn_3", "flash_attn_varlen_func", 3),
    ("heddle.flash_attn_3", "flash_attn_with_kvcache", 3),
    ("heddle.lowbit", "load", 3),
]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing has no get_overloads")
@pytest.mark.parametrize("module, name, count", OVERLOADED)
def test_overloads_are_of_the_function(module, name, count):
    """Names in the same order, the kinds of arguments, and which have defaults; what they are is mypy's to hold together."""
    from typing import get_overloads

    function = getattr(importlib.import_module(module), name)
    own = inspect.signature(function).parameters
    overloads = get_overloads(function)
    assert len(overloads) == count
    for overload in overloads:
        found = inspect.signature(overload).parameters
        if "options" in found:  # a TypedDict that the tests above hold to the function
            found = {k: p for k, p in found.items() if k != "options"}
            rest = own.keys() - found.keys()
            assert rest <= _types.AttentionOptions.__annotations__.keys() | {"options"}
            assert [k for k in own if k in found] == list(found)
            continue
        assert list(found) == list(own)
        for key, parameter in found.items():
            flag = key in ("return_attn_probs", "return_softmax_lse", "framework")
            assert flag or (parameter.default is parameter.empty) == (own[key].default is parameter.empty), key
        at = [p.kind for p in found.values()].index(3) if 3 in [p.kind for p in found.values()] else len(found)
        assert all(p.kind == own[k].kind for k, p in itertools.islice(found.items(), at))


PUBLIC = ("distributed", "lowbit", "nn", "nsa", "selection", "flash_attn", "flash_attn_3", "hosts.torch", "compat.asam")


@pytest.mark.parametrize("name", PUBLIC)
def test_dir_is_what_is_public(name):
    module = importlib.import_module(f"heddle.{name}")
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


def test_dir_of_the_package():
    extra = {"compat", "distributed", "flash_attn", "flash_attn_3", "nn", "nsa", "selection", "hosts", "__version__"}
    assert set(dir(heddle)) == {*heddle.__all__, *extra}
    assert all(hasattr(heddle, name) for name in dir(heddle))
    assert dir(importlib.import_module("heddle.hosts")) == ["torch", "transformers"]
    with pytest.raises(AttributeError, match="module 'heddle' has no attribute 'atention'"):
        heddle.atention  # noqa: B018


def test_classes_of_a_kind_are_classes():
    matrix = lowbit.quantize(torch.ones(16, 32), "nvfp4")
    assert type(matrix) is lowbit.QuantizedTensor and lowbit.QuantizedTensor[np.ndarray] is not None
    assert type(lowbit.pack(matrix)) is lowbit.PackedTensor


def mistakes():
    """What mypy says of them, by line."""
    lines = enumerate(_CASES.read_text().splitlines(), 1)
    return {number: line.partition("# error: ")[2] for number, line in lines if "  # error: " in line}


def test_another_type_checker_sees_the_same_mistakes():
    pytest.importorskip("pyright", reason="pyright is not installed")
    if not (_ROOT / "pyproject.toml").is_file():
        pytest.skip("the package's sources are not beside the tests")
    asked = ["-m", "pyright", "-p", "pyproject.toml", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run([sys.executable, *asked], cwd=_ROOT, capture_output=True, text=True)
    found = {said["range"]["start"]["line"] + 1 for said in json.loads(done.stdout)["generalDiagnostics"]}
    assert found == mistakes().keys(), done.stdout


def test_a_type_checker_sees_mistakes():
    pytest.importorskip("mypy", reason="mypy is not installed")
    if not (_ROOT / "pyproject.toml").is_file():
        pytest.skip("the package's sources are not beside the tests")
    done = subprocess.run([sys.executable, "-m", "mypy", str(_CASES)], cwd=_ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    found = {int(line): text for line, text in re.findall(r"typing_cases\.py:(\d+): error: (.*)", done.stdout)}
    wanted = mistakes()
    assert len(wanted) == 36
    assert found.keys() == wanted.keys(), done.stdout
    for number, text in wanted.items():
        assert text in found[number]
