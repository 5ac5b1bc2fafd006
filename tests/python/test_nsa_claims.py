"""The claims of sharing beside measurement: counters against counts by hand, the benchmark from end to end, and its tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "scripts")]
import heddle.nsa  # noqa: E402
import nsa_claims  # noqa: E402
import nsa_claims_table  # noqa: E402
import nsa_counts  # noqa: E402
from nsa_counts import Case  # noqa: E402

CASES = [
    Case(rows=53, heads=6, kv_heads=2, head_size=8, block=16, slots=2, window=0),
    Case(rows=100, heads=4, kv_heads=2, head_size=8, block=16, slots=3, window=24, element=2),
    Case(rows=15, heads=2, kv_heads=2, head_size=8, block=16, slots=3, window=5),
]
VARIANTS = ("plain", "seed", "seed_4_3")
STEPS_AT_ANCHORS = {
    "plain": (),
    "seed": ("selection", "selected", "window"),
    "seed_4_3": ("compressed", "selection", "selected", "window"),
}


def case_of(case, variant):
    x = nsa_claims.operands(case, torch.float32)
    options = nsa_claims.variants(case)[variant]
    return x, nsa_claims.chosen_lists(case, x), options


def keys_by_hand(case, variant, lists, step, row, head):
    """The keys, or pooled keys, that a row attends."""
    if row % 2 and step in STEPS_AT_ANCHORS[variant]:
        return set()
    if step in ("compressed", "selection"):
        return {c for c in range(case.rows // case.block) if (c + 1) * case.block <= row + 1}
    if step == "window":
        return {j for j in range(row + 1) if j > row - case.window}
    return {j for j in range(row + 1) if j // case.block in lists[0, row, head].tolist()}


def rows_of(case, part):
    return [t for t in range(case.rows) if part == "all" or t % 2 == (part == "odd")]


def done_by_hand(case, variant, step, row):
    return not (row % 2 and step in STEPS_AT_ANCHORS[variant]) and (step != "window" or case.window > 0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"T{case.rows}w{case.window}")
class TestCounts:
    def test_flops_of_every_row_head_and_key(self, case, variant):
        _, lists, options = case_of(case, variant)
        found = nsa_counts.flops(case, nsa_counts.strides(options), lists[0])
        group, size = case.heads // case.kv_heads, case.head_size
        for part in nsa_counts.PARTS:
            for step in ("compressed", "selection", "selected", "window"):
                pairs = sum(
                    group * len(keys_by_hand(case, variant, lists, step, t, h))
                    for t in rows_of(case, part)
                    for h in range(case.kv_heads)
                )
                products = {"forward": 1 if step == "selection" else 2, "backward": 0 if step == "selection" else 5}
                for name, count in products.items():
                    assert found[name][step][part] == pairs * count * 2 * size, (name, step, part)
            pooled = sum(t < case.rows // case.block * case.block for t in rows_of(case, part))
            assert found["forward"]["pooling"][part] == pooled * 2 * case.kv_heads * size
            assert found["backward"]["pooling"][part] == found["forward"]["pooling"][part]

    @pytest.mark.parametrize("each_row", (True, False))
    def test_bytes_of_every_tensor(self, case, variant, each_row):
        _, lists, options = case_of(case, variant)
        found = nsa_counts.moved(case, nsa_counts.strides(options), lists[0], each_row=each_row)
        q, o = case.heads * case.head_size * case.element, case.heads * case.head_size * 4
        lse = gate = case.heads * 4
        key = case.head_size * case.element
        for part in nsa_counts.PARTS:
            rows = rows_of(case, part)
            for step in ("compressed", "selection", "selected", "window"):
                read = [
                    (h, j)
                    for t in rows
                    for h in range(case.kv_heads)
                    for j in keys_by_hand(case, variant, lists, step, t, h)
                ]
                distinct = len(set(read))
                read = len(read) if each_row else distinct
                count = sum(done_by_hand(case, variant, step, t) for t in rows)
                of_list = case.kv_heads * case.slots * 4 if step in ("selection", "selected") else 0
                if step == "selection":
                    forward, backward = count * (q + lse + of_list) + read * key, 0
                else:
                    forward = count * (q + o + lse + of_list) + read * 2 * key
                    backward = count * (2 * q + 2 * o + lse + of_list) + (read + distinct) * 2 * key
                assert found["forward"][step][part] == forward, (step, part)
                assert found["backward"][step][part] == backward, (step, part)
            forward = backward = len(rows) * q
            for step in ("compressed", "selected", "window"):
                if step == "window" and case.window == 0:
                    continue
                own = sum(done_by_hand(case, variant, step, t) for t in rows)
                forward += own * gate + (len(rows) if each_row else own) * o
                backward += 2 * own * (gate + o)
            assert found["forward"]["result"][part] == forward
            assert found["backward"]["result"][part] == backward

    def test_what_is_kept_is_what_autograd_keeps(self, case, variant):
        x, lists, options = case_of(case, variant)
        x = {
            name: value.to(torch.bfloat16) if case.element == 2 and name in "qkv" else value
            for name, value in x.items()
        }
        counted = nsa_counts.kept(case, nsa_counts.strides(options), lists[0])
        assert counted["all"] == counted["even"] + counted["odd"]
        measured = nsa_claims.kept_bytes(case, "kernels", x, lists, options)
        slack = 64  # numbers that operations keep beside tensors
        if variant == "plain":
            blocks = -(-case.rows // case.block)  # a list is no longer than there are blocks
            empty = case.rows * case.kv_heads * max(0, case.slots - blocks) * 4
            assert counted["all"] - empty <= measured <= counted["all"] + slack
        else:  # the whole q and the gates that rows do not read are kept with the rest
            assert counted["all"] <= measured + case.rows * case.kv_heads * case.slots * 4


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: f"T{case.rows}")
def test_the_latest_blocks_have_as_many_keys_as_those_that_were_chosen(case):
    _, lists, _ = case_of(case, "plain")
    latest = nsa_counts.latest_blocks(case.rows, case.block, case.slots).expand(-1, case.kv_heads, -1)
    if case.slots > 2:  # with two, the first block and the one before go in front of the row's own
        assert torch.equal(nsa_counts.listed(case, latest).sum(-1), nsa_counts.listed(case, lists[0]).sum(-1))
    long = nsa_claims.counted_long(case, case.rows)["flops"]
    steps = nsa_counts.flops(case, nsa_counts.Strides(), latest)["forward"]
    assert long["plain"] * case.kv_heads == sum(parts["all"] for parts in steps.values())


def test_nothing_but_shared_outputs_is_counted():
    with pytest.raises(ValueError, match="share is 'selection': only 'output' is counted"):
        nsa_counts.strides(dict(heddle.nsa.presets(4)["fast"]))


def test_products_of_the_naive_functions_are_whole_tiles():
    """Keys up to the last row of every 64, as the reference functions take them; forward is two products, backward four."""
    case = CASES[1]
    x, lists, _ = case_of(case, "plain")
    ends = [(64, 64), (36, 100)]  # rows, keys
    pairs = case.heads * sum(rows * keys for rows, keys in ends)
    windows = case.heads * (64 * 64 + 36 * (100 - (64 - case.window + 1)))
    call = nsa_claims.call_of("naive_nsa", "forward", case, x, lists, {})
    assert nsa_claims.products(call) == 2 * 2 * case.head_size * (pairs + windows)


def test_a_peak_is_of_what_is_there_at_once():
    def call():
        for _ in range(3):
            torch.ones(1000)
        return (torch.ones(500), torch.ones(250))

    assert 1000 * 4 <= nsa_claims.peak_bytes(call) <= 1000 * 4 + 1000
    assert 750 * 4 <= nsa_claims.peak_bytes(lambda: (torch.ones(500), torch.ones(250))) <= 750 * 4 + 1000


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    out = tmp_path_factory.mktemp("claims") / "claims.json"
    command = [sys.executable, str(ROOT / "bench/nsa_claims.py"), "--quick", "--threads", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text(encoding="utf-8"))


class TestEndToEnd:
    def test_a_file_says_where_and_of_what(self, content):
        assert {"commit", "cpu", "date", "threads", "torch"} <= set(content["conditions"])
        assert [(row["dtype"], row["window"] > 0) for row in content["rows"]] == [
            ("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True),
        ]  # fmt: skip

    def test_even_rows_are_those_of_plain(self, content):
        for row in content["rows"]:
            for path in set(row["measured"]) & {"kernels", "naive"}:
                for name in nsa_claims.PRESETS:
                    error = row["measured"][path][name]["error"]
                    assert error["even"] < 1e-3 < error["odd"], (row["name"], path, name)

    def test_tables_have_every_claim_and_every_median(self, content):
        text = nsa_claims_table.written([("a.json", content)])
        float32 = [row for row in content["rows"] if row["dtype"] == "float32"]
        for claim in nsa_claims_table.CLAIMS:
            assert text.count(f"| {claim.words} |") + text.count(f"| {claim.words} † |") == len(float32)
        assert text.count("| `parallel_nsa`, forward |") == len(content["rows"])

    def test_a_file_without_a_figure_is_refused_in_words(self, content):
        short = json.loads(json.dumps(content))
        del short["rows"][0]["measured"]["kernels"]["seed"]["peak"]["training"]
        with pytest.raises(
            ValueError, match=r"a\.json has no figure 'training': measure again by bench/nsa_claims\.py"
        ):
            nsa_claims_table.written([("a.json", short)])
        short["rows"] = [row for row in content["rows"] if row["dtype"] == "bfloat16"]
        with pytest.raises(ValueError, match=r"a\.json has no row of the naive functions"):
            nsa_claims_table.written([("a.json", short)])


def test_without_files_the_page_says_so():
    assert nsa_claims_table.written([]) == nsa_claims_table.NONE


def claim(kind, low, high):
    return nsa_claims_table.Claim("", kind, low, high, {}, "")


@pytest.mark.parametrize("kind, low, high, value, words", [
    ("times", 1.8, 1.9, 1.76, "as claimed"), ("times", 1.8, 1.9, 1.74, "short of it"), ("times", 1.8, 1.9, 1.96, "beyond it"),
    ("less", 0.3, 0.4, 0.35, "as claimed"), ("less", 0.32, 0.32, 0.28, "short of it"), ("less", 0.5, 0.5, 0.54, "beyond it"),
    ("less", 0.0, 0.0, 0.2, "saves, too"), ("less", 0.0, 0.0, -0.2, "costs more"), ("times", 1.0, 1.0, 1.04, "as claimed"), ("times", 1.0, 1.0, 1.2, "faster"), ("times", 1.0, 1.0, 0.9, "slower"),
])  # fmt: skip
def test_words_follow_the_figures(kind, low, high, value, words):
    assert nsa_claims_table.against(claim(kind, low, high), value) == words


def test_changes_are_written_with_their_sign():
    assert [nsa_claims_table.as_text("less", x) for x in (0.321, -0.1, 0.001)] == ["−32 %", "+10 %", "0 %"]
    assert nsa_claims_table.as_text("times", 1.849) == "1.85"
