"""What Heddle reads from transformers' mask functions, held to the masks that transformers itself writes out."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

pytest.importorskip("transformers", reason="transformers is not installed")

import heddle
import heddle.hosts.transformers  # noqa: F401  says what is missing, if anything is
from heddle.hosts.transformers.attention import attention
from heddle.hosts.transformers.limits import Limits, is_limits, read_limits
from heddle.hosts.transformers.masks import Pattern, _pattern_in_graph, documents_of, mask
from transformers import masking_utils as theirs

_PATTERNS = {
    "causal": theirs.causal_mask_function,
    "causal window": theirs.sliding_window_causal_mask_function(3),
    "bidirectional": theirs.bidirectional_mask_function,
    "bidirectional window": theirs.sliding_window_bidirectional_mask_function(2),
}
# tokens (1) and padding (0) of two sequences of up to 7 keys
_PADDINGS = {
    "none": None,
    "full": [[1] * 7, [1] * 7],
    "left": [[0, 0, 1, 1, 1, 1, 1], [1] * 7],
    "right": [[1, 1, 1, 1, 0, 0, 0], [1] * 7],
    "both": [[0, 1, 1, 1, 1, 1, 0], [1] * 7],
    "middle": [[1, 1, 0, 1, 1, 1, 1], [1] * 7],
    "empty": [[0] * 7, [1] * 7],
}


def _arguments(pattern, padding, rows, first, keys):
    local = 3 if "window" in pattern else None
    causal = pattern.startswith("causal")
    return dict(
        batch_size=2,
        q_length=rows,
        kv_length=keys,
        q_offset=first,
        kv_offset=0,
        mask_function=_PATTERNS[pattern],
        attention_mask=None if padding is None else torch.tensor(padding, dtype=torch.bool)[:, : first + rows],
        local_size=local,
        allow_is_causal_skip=causal,
        allow_is_bidirectional_skip=not causal,
    )


def _true_mask(arguments):
    """The mask, written out by transformers."""
    written = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return theirs.sdpa_mask(**written).expand(2, 1, arguments["q_length"], arguments["kv_length"])


def _said(found, rows, keys, causal):
    """What our mask function's result means to our attention function, written out."""
    if found is None:
        where = torch.ones(rows, keys, dtype=torch.bool)
        return (where.tril() if causal and rows > 1 else where).expand(2, 1, rows, keys)
    if is_limits(found):
        return read_limits(found).mask(2, rows, keys, found.device).expand(2, 1, rows, keys)
    return found


# (rows, the first row's place, keys): a prompt, one in a static cache, a piece of a prompt, a token, one in a static cache
_PLACES = [(7, 0, 7), (5, 0, 7), (3, 4, 7), (3, 2, 7), (1, 6, 7), (1, 4, 7)]


@pytest.mark.parametrize("pattern,padding,place", list(itertools.product(_PATTERNS, _PADDINGS, _PLACES)))
def test_means_what_transformers_masks_mean(pattern, padding, place):
    rows, first, keys = place
    arguments = _arguments(pattern, _PADDINGS[padding], *place)
    truth = _true_mask(arguments)
    found = mask(**arguments)
    said = _said(found, rows, keys, pattern.startswith("causal"))
    # Rows of padding may meet no key; the others meet what they should.
    tokens = torch.ones(2, rows, dtype=torch.bool)
    if arguments["attention_mask"] is not None and pattern.startswith("causal"):
        tokens = arguments["attention_mask"][:, first : first + rows]
    assert torch.equal(said[:, 0][tokens], truth[:, 0][tokens])
    assert not (said[:, 0][~tokens] & ~truth[:, 0][~tokens]).any()


@pytest.mark.parametrize(
    "pattern,padding,place,kind",
    [
        ("causal", "none", (7, 0, 7), "none"),
        ("causal", "full", (7, 0, 7), "none"),
        ("causal", "none", (1, 6, 7), "none"),
        ("causal", "none", (5, 0, 7), {"causal", "used_k"}),
        ("causal", "none", (3, 4, 7), {"causal"}),
        ("causal", "left", (7, 0, 7), {"causal", "leftpad"}),
        ("causal", "left", (1, 6, 7), {"leftpad"}),
        ("causal", "right", (7, 0, 7), {"causal", "used_k", "used_q"}),
        ("causal", "middle", (7, 0, 7), "bool"),
        ("causal", "both", (7, 0, 7), "bool"),
        ("causal window", "none", (7, 0, 7), {"causal", "window"}),
        ("causal window", "left", (7, 0, 7), {"causal", "window", "leftpad"}),
        ("causal window", "right", (7, 0, 7), {"causal", "window", "used_k", "used_q"}),
        ("bidirectional", "none", (7, 0, 7), "none"),
        ("bidirectional", "right", (7, 0, 7), {"used_k"}),
        ("bidirectional", "left", (7, 0, 7), {"leftpad"}),
        ("bidirectional", "both", (7, 0, 7), {"leftpad", "used_k"}),
        ("bidirectional window", "none", (7, 0, 7), {"window"}),
        ("bidirectional window", "right", (7, 0, 7), "bool"),
    ],
)
def test_gives_the_cheapest(pattern, padding, place, kind):
    found = mask(**_arguments(pattern, _PADDINGS[padding], *place))
    if kind == "none":
        assert found is None
    elif kind == "bool":
        assert found.dtype == torch.bool
    else:
        limits = read_limits(found)
        names = {"leftpad", "used_k", "used_q", "documents", "window", "causal"}
        said = {name: getattr(limits, name) for name in names}
        assert {name for name, x in said.items() if x is not None and x is not False} == kind


def test_reads_packed_sequences():
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    document = theirs.find_packed_sequence_indices(position_ids)
    for inner, window in (
        (theirs.causal_mask_function, None),
        (theirs.sliding_window_causal_mask_function(2), 2),
    ):
        if hasattr(theirs, "remap_positions_for_packed_sequence"):  # from transformers 5.23 on
            inner = theirs.remap_positions_for_packed_sequence(inner, position_ids)
        function = theirs.and_masks(inner, theirs.packed_sequence_mask_function(document))
        arguments = dict(batch_size=2, q_length=6, kv_length=6, mask_function=function, allow_is_causal_skip=False)
        limits = read_limits(mask(**arguments))
        assert (limits.causal, limits.window) == (True, window)
        assert limits.documents.tolist() == [0, 3, 5, 6, 12]
        assert torch.equal(limits.mask(2, 6, 6, torch.device("cpu")), theirs.sdpa_mask(**arguments))
    assert documents_of(position_ids).tolist() == [0, 3, 5, 6, 12]
    assert documents_of(position_ids[1:]) is None


def test_positions_that_do_not_start_again_are_of_one_document():
    """As of images: the same for all tokens of a row of patches, and a leap behind them."""
    assert documents_of(torch.tensor([[0, 1, 2, 2, 2, 3, 7, 8], [4, 5, 6, 7, 8, 9, 9, 10]])) is None
    assert documents_of(torch.tensor([[0, 0, 0, 1, 5, 2, 3, 4]])).tolist() == [0, 1, 2, 5, 8]


@pytest.mark.parametrize(
    "function",
    [
        theirs.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
        theirs.or_masks(theirs.causal_mask_function, lambda b, h, q, k: k < 2),
        theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, k: k != 1),
        theirs.and_masks(theirs.sliding_window_overlay(3), theirs.sliding_window_causal_mask_function(2)),
        theirs.and_masks(theirs.sliding_window_bidirectional_overlay(3), theirs.causal_mask_function),
    ],
    ids=["chunked", "or", "and", "two windows", "two-sided causal window"],
)
def test_writes_out_what_it_does_not_know(function):
    arguments = dict(batch_size=2, q_length=6, kv_length=6, mask_function=function, local_size=1)
    assert torch.equal(mask(**arguments), theirs.sdpa_mask(**arguments))


def test_reads_a_graphs_masks_from_what_is_asked_for():
    """While a graph is traced, chunks and windows differ in the model's configuration alone."""

    def said(**asked):
        usual = dict(
            q_offset=0,
            kv_offset=0,
            attention_mask=None,
            allow_is_causal_skip=True,
            mask_function=theirs.causal_mask_function,
            config=SimpleNamespace(sliding_window=3),
        )
        return _pattern_in_graph({**usual, **asked})

    assert said() == Pattern(True)
    assert said(local_size=3, mask_function=None) == Pattern(True, 3)
    chunked = SimpleNamespace(sliding_window=3, attention_chunk_size=3)
    assert said(local_size=3, mask_function=None, config=chunked) is None
    assert said(local_size=4, mask_function=None) is None
    assert said(mask_function=None) is None
    assert said(allow_is_causal_skip=False) is None
    assert said(q_offset=torch.tensor(2)) is None
    assert said(attention_mask=torch.ones(1, 2, dtype=torch.bool)) is None


def test_writes_out_what_the_caller_wants_to_see():
    arguments = dict(batch_size=2, q_length=6, kv_length=6, allow_is_causal_skip=False)
    assert torch.equal(mask(**arguments), theirs.sdpa_mask(**arguments))


def _operands(rows=6, keys=6):
    torch.manual_seed(1)
    return torch.randn(2, 4, rows, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


_LIMITS = [
    Limits(True),
    Limits(True, 2),
    Limits(False, 2),
    Limits(True, 3, leftpad=_ints(2, 0)),
    Limits(False, None, leftpad=_ints(1, 0), used_k=_ints(4, 6)),
    Limits(True, 2, used_k=_ints(4, 6), used_q=_ints(4, 6)),
    Limits(True, None, documents=_ints(0, 2, 6, 12)),
    Limits(False, 1, documents=_ints(0, 2, 6, 12)),
]


@pytest.mark.parametrize("limits", _LIMITS)
@pytest.mark.parametrize("gradients", [False, True])
def test_attends_within_limits(limits, gradients):
    q, k, v = (x.requires_grad_(gradients) for x in _operands())
    bias = torch.randn(1, 4, 6, 6)
    module = SimpleNamespace(is_causal=False)
    written = limits.mask(2, 6, 6, q.device)
    for position_bias in (None, bias):
        expected = torch.where(written, 0.0 if position_bias is None else position_bias, -torch.inf)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, expected, enable_gqa=True).nan_to_num(0)
        out, weights = attention(module, q, k, v, limits.tensor(2, "cpu"), position_bias=position_bias)
        assert weights is None and out.shape == (2, 6, 4, 8) and out.is_contiguous()
        assert not ((out.transpose(1, 2) - expected).abs().max() > 1e-5)
        if gradients and not (written.sum(-1) == 0).any():  # torch's are NaN for a row without a key
            wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
            found = torch.autograd.grad(out.square().sum(), (q, k, v))
            for a, b in zip(wanted, found):
                assert not ((a - b).abs().max() > 1e-4)


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position_bias", [False, True])
def test_additive_masks_of_the_lowest_number(mask_dtype, position_bias):
    """What transformers writes for eager attention: a row of padding has it everywhere, and gives the mean of the values."""
    q, k, v = (x.to(mask_dtype) for x in _operands())
    written = Limits(True, 2, leftpad=_ints(2, 0)).mask(2, 6, 6, q.device)
    lowest = torch.where(written, 0.0, torch.finfo(mask_dtype).min).to(mask_dtype)
    assert (lowest[0, 0, :2] == torch.finfo(mask_dtype).min).all()
    bias = torch.randn(1, 4, 6, 6).to(mask_dtype) if position_bias else None
    found, _ = attention(SimpleNamespace(is_causal=False), q, k, v, lowest, position_bias=bias)
    both = lowest if bias is None else lowest + bias
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, both, enable_gqa=True)
    assert not ((found.transpose(1, 2) - expected).abs().max() > (1e-5 if mask_dtype == torch.float32 else 2e-2))
    mean = v[0].float().mean(1).repeat_interleave(2, 0)
    assert not ((found[0, :2].float() - mean).abs().max() > (1e-5 if mask_dtype == torch.float32 else 2e-2))


def test_limits_go_through_a_compiler():
    q, k, v = _operands()
    module = SimpleNamespace(is_causal=False)
    compiled = torch.compile(lambda mask: attention(module, q, k, v, mask)[0], fullgraph=True, backend="aot_eager")
    for limits in _LIMITS:  # the same code for each: shapes are not taken for sizes
        carried = limits.tensor(2, "cpu")
        assert torch.equal(compiled(carried), attention(module, q, k, v, carried)[0])


def test_refuses_what_is_not_served():
    q, k, v = _operands()
    layer = torch.nn.Identity()
    with pytest.raises(
        NotImplementedError, match="output_attentions is True: the matrix of probabilities is never made"
    ):
        attention(layer, q, k, v, None, output_attentions=True)
    with pytest.raises(
        NotImplementedError, match="Identity gives indices, keys chosen for each row: that is not served"
    ):
        attention(layer, q, k, v, None, indices=torch.zeros(1))
    with pytest.raises(ValueError, match=r"attention_mask is \[2, 6\]: it must have four dimensions"):
        attention(layer, q, k, v, torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attention_mask is torch.int64: it must be torch.bool"):
        attention(layer, q, k, v, torch.ones(2, 1, 6, 6, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\[2, 2, 2, 1\] of uint32, and not as Heddle made it"):
        attention(layer, q, k, v, Limits(True).tensor(2, "cpu").repeat(1, 1, 2, 1))
    with pytest.raises(
        NotImplementedError, match="Identity gives position_bias beside cu_seq_lens_q: that is not served"
    ):
        attention(layer, q, k, v, None, position_bias=torch.zeros(1, 4, 6, 6), cu_seq_lens_q=_ints(0, 2, 12))


def test_sequences_by_their_lengths():
    """Rows and keys of their own lengths, as flattened batches have."""
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    module = SimpleNamespace(is_causal=True)
    starts = dict(cu_seq_lens_q=torch.tensor([0, 2, 5]), cu_seq_lens_k=torch.tensor([0, 3, 9]), max_length_q=3)
    found, _ = attention(module, q, k, v, None, **starts)
    for rows, keys in ((slice(0, 2), slice(0, 3)), (slice(2, 5), slice(3, 9))):
        x, y, z = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        expected = heddle.sdpa(x, y, z, causal_lower_right(x.shape[2], y.shape[2]), enable_gqa=True)
        assert not ((found[:, rows].transpose(1, 2) - expected).abs().max() > 1e-5)


@pytest.mark.parametrize("keys", [4, 9])
def test_causal_from_the_first_key_where_nothing_else_is_said(keys):
    q, k, v = _operands(6, keys)
    found, _ = attention(SimpleNamespace(is_causal=True), q, k, v, None)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert not ((found.transpose(1, 2) - expected).abs().max() > 1e-5)


def test_one_row_of_positions_for_a_batch():
    q, k, v = _operands()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    module = SimpleNamespace(is_causal=True)
    found, _ = attention(module, q, k, v, None, position_ids=positions)
    expected, _ = attention(module, q, k, v, torch.block_diag(*[torch.ones(3, 3).tril()] * 2).bool()[None, None])
    assert not ((found - expected).abs().max() > 1e-5)


@pytest.mark.parametrize("name", ["flash_heddle", "heddle/attention", "sdpa", "eager", ""])
def test_refuses_names_that_mean_something_else(name):
    with pytest.raises(ValueError, match="must not be empty or one of transformers' own, nor have 'flash'"):
        heddle.hosts.transformers.register(name)


def test_refuses_what_is_no_name():
    with pytest.raises(TypeError, match=r"\[register\] name is 5: it must be a string"):
        heddle.hosts.transformers.register(5)


def test_refuses_an_unknown_kind_of_masks():
    with pytest.raises(ValueError, match="masks is 'small': it must be 'limits' or 'boolean'"):
        heddle.hosts.transformers.register(masks="small")
