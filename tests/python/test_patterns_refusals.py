"""What is no pattern of sparse attention, and the words that say so."""

import re

import pytest
import torch
from heddle import patterns
from heddle.patterns import (
    attention,
    local,
    parse,
    random,
)

WORDS = {
    "": "'', character 1: expected a pattern here: local, strided, dilated, sink, columns, rows, diagonals, random, or '('",
    "locl(3)": "'locl(3)', character 1: there is no pattern 'locl'; there are local, strided,",
    "local(3) | ": "'local(3) | ', character 12: expected a pattern here",
    "local(3) || sink(2)": "character 11: expected a pattern here",
    "(local(3)": "'(local(3)', character 10: expected ')' here",
    "local(3))": "character 9: there is no '(' to this one",
    "local(3) sink(2)": "character 10: expected '|', '&' or the end here",
    "local 3": "character 7: expected '(' and the numbers of local here",
    "local(": "character 7: expected left of local here, an integer",
    "local()": "character 7: expected left of local here, an integer",
    "local(1.5)": "character 8: expected ',' or ')' here",
    "local(1, 2, 3)": "character 13: local has no more than 2 numbers",
    "local(-1)": "character 7: left of local is -1: it must be from 0 to 2147483647",
    "strided(0)": "step of strided is 0: it must be from 1 to 2147483647",
    "sink(99999999999999999999)": "n of sink is 99999999999999999999: it must be from 0 to 2147483647",
    "dilated(3)": "step of dilated is missing",
    "random(seed=1)": "n of random is missing",
    "random(1, seeds=1)": "character 11: random has no 'seeds'",
    "random(1, seed)": "expected '=' and seed of random here",
    "random(1, n=2)": "n of random is given twice",
    "random(n=1, 64)": "a number without a name is behind one that has one",
    "columns()": "expected a column of columns here, an integer",
    "columns(1,)": "character 11: expected a column of columns here, an integer",
    "(" * 101 + "sink(1)" + ")" * 101: "character 102: parentheses are nested more than 100 deep",
}


@pytest.mark.parametrize("expression", WORDS)
def test_what_is_no_pattern_is_named_with_its_place(expression):
    with pytest.raises(ValueError, match=r"^\[patterns\] .*" + re.escape(WORDS[expression])):
        parse(expression)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: parse(3), TypeError, "an expression is a int: it must be a str"),
        (lambda: patterns.Pattern(), ValueError, "there is no expression"),
        (lambda: local(1.5), TypeError, "a number of local is 1.5: it must be an int"),
        (lambda: local(True), TypeError, "a number of local is True: it must be an int"),
        (lambda: random(1, seed="x"), TypeError, "seed of random is 'x': it must be an int"),
        (lambda: local(-2), ValueError, "'local(-2)', character 7: left of local is -2"),
        (lambda: local(3).lists(), ValueError, "give seq_len or cu_seqlens: neither is there"),
        (lambda: local(3).lists(3, cu_seqlens=[0, 3]), ValueError, "give seq_len or cu_seqlens: not both"),
        (lambda: local(3).lists(-3), ValueError, "seq_len is -3: it must be at least 0"),
        (lambda: local(3).lists((1, 2, 3)), ValueError, "seq_len is (1, 2, 3): it must be an int, or a pair"),
        (lambda: local(3).lists(4.0), TypeError, "seq_len is 4.0: it must be an int"),
        (lambda: local(3).lists((5, 4)), ValueError, "a sequence has 5 rows and 4 keys: rows are its last positions"),
        (lambda: local(3).mask((5, 4)), ValueError, "a sequence has 5 rows and 4 keys: there must be no more rows"),
        (lambda: local(3).lists(1 << 31), ValueError, "a sequence has 2147483648 rows and 2147483648 keys"),
        (lambda: local(3).lists(9, block_size=48), ValueError, "block_size is 48: it must be 16, 32, 64 or 128"),
        (lambda: local(3).lists(9, query_rows=2000), ValueError, "query_rows is 2000: it must be from 1 to 1024"),
        (lambda: local(3).lists(9, causal="top_left"), TypeError, "causal is 'top_left': it must be True or False"),
        (lambda: random(3).lists(9), ValueError, "heads is missing: random draws for each head"),
        (lambda: local(3).lists(cu_seqlens=[1, 3]), ValueError, "cu_seqlens is [1, 3]...: it must begin with 0"),
        (lambda: local(3).lists(cu_seqlens=[0, 3, 2]), ValueError, "cu_seqlens[2] is 2: it must be at least the one before, 3"),
        (lambda: local(3).lists(cu_seqlens=3), TypeError, "cu_seqlens is a int: it must be int32 [sequences + 1]"),
        (lambda: local(3).lists(cu_seqlens=[0, 3], cu_seqlens_k=[0, 1, 3]), ValueError, "cu_seqlens has 1 sequences and cu_seqlens_k has 2"),
        (lambda: local(3).lists(3, cu_seqlens_k=[0, 3]), ValueError, "cu_seqlens_k is given without cu_seqlens"),
        (lambda: attention(*[torch.zeros(1, 4, 1, 8)] * 3, 7), TypeError, "pattern is a int: it must be a Pattern, or a str"),
        (lambda: attention(*[torch.zeros(1, 4, 1, 8)] * 3, "sink(1)", causal="bottom_right"), TypeError, "causal is 'bottom_right': it must be True or False"),
        (lambda: attention(*[torch.zeros(4, 8)] * 3, "sink(1)"), ValueError, "q is [4, 8]: it must be [B, S, H, D], or packed"),
        (lambda: setattr(local(3), "expressions", ()), AttributeError, "a Pattern cannot be changed"),
    ],
)  # fmt: skip
def test_refusals(call, error, words):
    with pytest.raises(error, match=r"^\[patterns\] " + re.escape(words)):
        call()


def test_other_values_are_no_patterns():
    assert local(3).__or__(3) is NotImplemented
    with pytest.raises(TypeError, match="unsupported operand"):
        local(3) & "sink(1)"
