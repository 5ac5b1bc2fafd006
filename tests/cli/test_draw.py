"""heddle draw: the picture holds the tiles that the mask has, and nothing else."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from command import needs_command, run, run_json

pytestmark = needs_command

SVG = "{http://www.w3.org/2000/svg}"
COLOURS = {"#1f4e79": "whole", "#7fb0de": "partial", "#e9edf2": "there"}


def tiles_of(path):
    """{"whole", "partial", "there"}: bool [tiles of rows, tiles of keys], from the rectangles of the picture's paths."""
    picture = ElementTree.parse(path).getroot().find(f"{SVG}svg")
    _, _, columns, rows = map(int, picture.get("viewBox").split())
    found = {name: np.zeros((rows, columns), bool) for name in COLOURS.values()}
    for element in picture:
        tiles = found[COLOURS[element.get("fill")]]
        pieces = re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", element.get("d"))
        assert "".join(f"M{x} {y}h{w}v1h-{w}z" for x, y, w, _ in pieces) == element.get("d")
        for x, y, width, _ in pieces:
            tiles[int(y), int(x) : int(x) + int(width)] = True
    return found


def of_local_or_strided(p, j):
    return (abs(p - j) <= 40) | ((p - j) % 200 == 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows, keys", [(64, 64), (48, 32)])
def test_the_picture_is_of_the_mask(tmp_path, causal, rows, keys):
    length, path = 500, tmp_path / "picture.svg"
    found = run_json(
        "draw", "local(40)|strided(200)", "--length", length, "--query-rows", rows, "--block-size", keys, "-o", path,
        *["--causal"][:causal],
    )  # fmt: skip
    p, j = np.arange(length)[:, None], np.arange(length)
    there = (j <= p) | (not causal)
    mask = of_local_or_strided(p, j) & there

    def tiled(x, outside):
        wide = np.full((-(-length // rows) * rows, -(-length // keys) * keys), outside)
        wide[:length, :length] = x
        return wide.reshape(-1, rows, wide.shape[1] // keys, keys)

    met = tiled(mask, False).any((1, 3))
    whole = met & tiled(mask | ~there, True).all((1, 3))
    drawn = tiles_of(path)
    assert np.array_equal(drawn["whole"], whole)
    assert np.array_equal(drawn["partial"], met & ~whole)
    assert np.array_equal(drawn["there"], tiled(there, False).any((1, 3)))
    assert found["pattern"] == "local(40) | strided(200)" and found["out"] == str(path)
    assert (found["whole_tiles"], found["partial_tiles"]) == (whole.sum(), (met & ~whole).sum())
    assert found["all_tiles"] == drawn["there"].sum()
    assert found["pairs"] == pytest.approx(mask.sum() / there.sum())
    texts = [x.text for x in ElementTree.parse(path).getroot().iter(f"{SVG}text")]
    assert texts[0] == "local(40) | strided(200)" + ", causal" * causal


def test_heads_draw_their_own(tmp_path):
    paths = [tmp_path / f"{head}.svg" for head in (0, 1)]
    for head, path in enumerate(paths):
        text = run("draw", "random(3) & local(9000)", "--length", 4096, "--head", head, "-o", path)
        assert text.startswith(f"{path}: random(3) & local(9000), 192 whole and 0 partial of 4096 tiles, 4.69 % of")
        assert (tiles_of(path)["whole"].sum(1) == 3).all()
    assert not np.array_equal(*(tiles_of(path)["whole"] for path in paths))


def cells_of(picture, ranks):
    """int [rows, columns], the rank of each cell and -1 where it is nobody's, of one part of the picture of a plan."""
    _, _, columns, rows = map(int, picture.get("viewBox").split())
    colours = {f"hsl({r * 360 // ranks},60%,{60 if r % 2 else 45}%)": r for r in range(ranks)} | {"#e9edf2": -1}
    found = np.full((rows, columns), -2)
    for element in picture:
        for x, y, width, _ in re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", element.get("d")):
            found[int(y), int(x) : int(x) + int(width)] = colours[element.get("fill")]
    assert (found != -2).all()
    return found


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped", "per_document", "balanced"])
def test_a_plan_shows_who_computes_what(tmp_path, order):
    length, ranks, path = 96, 3, tmp_path / "plan.svg"
    flags = ["--ranks", ranks, "--order", order, "--length", length, "--documents", 50, 46]
    text = run("draw", *flags, "--causal", "--window", 40, 0, "-o", path)
    plan = run_json("explain", *flags, "--causal", "top_left", "--window", 40, 0)["plan"]
    assert (
        text
        == f"{path}: 3 ranks, {order}, 96 rows of 2 documents, causal, window 40 0: balance {plan['balance']:.3f}\n"
    )
    owner = np.full(length, -1)
    for rank, of_rank in enumerate(plan["ranks"]):
        for run_ in of_rank["runs"]:
            owner[run_["begin"] : run_["begin"] + run_["step"] * run_["count"] : run_["step"]] = rank
    p, j = np.arange(length)[:, None], np.arange(length)
    met = (j <= p) & (p - j <= 40) & ((p < 50) == (j < 50))
    keys, rows, square = (cells_of(x, ranks) for x in ElementTree.parse(path).getroot().findall(f"{SVG}svg"))
    assert np.array_equal(keys[0], owner) and np.array_equal(rows[:, 0], owner)
    assert np.array_equal(square, np.where(met, owner[:, None], -1))


def test_a_plan_of_many_rows_is_sampled(tmp_path):
    path = tmp_path / "plan.svg"
    found = run_json("draw", "--ranks", 64, "--order", "striped", "--length", 1 << 20, "--causal", "-o", path)
    assert found["balance"] > 0.99 and found["ranks"] == 64
    keys, _, square = (cells_of(x, 64) for x in ElementTree.parse(path).getroot().findall(f"{SVG}svg"))
    assert square.shape == (320, 320) and len(set(keys[0])) == 64  # of every rank
    assert "and 48 more" in path.read_text()


@pytest.mark.parametrize(
    "code, words, arguments",
    [
        (2, "[patterns] 'local(3) | snik(4)', character 12: there is no pattern 'snik'", ["local(3) | snik(4)"]),
        (2, "[patterns] block_size is 48: it must be 16, 32, 64 or 128", ["sink(1)", "--block-size", 48]),
        (2, "[patterns] query_rows is 0: it must be from 1 to 1024", ["sink(1)", "--query-rows", 0]),
        (2, "[patterns] first_head is -1: heads are numbered from 0", ["sink(1)", "--head", -1]),
        (2, "--length is 0: it must be at least 1", ["sink(1)", "--length", 0]),
        (2, "--length is 200000: that is 3125 x 3125 tiles, and a picture has at most 2048", ["sink(1)", "--length", 200000]),
        (3, "it cannot be written", ["sink(1)", "-o", "{folder}/missing/picture.svg"]),
        (2, "pattern is missing: an expression, or --ranks for a plan", []),
        (2, "pattern is given beside --ranks", ["sink(1)", "--ranks", 2]),
        (2, "--documents is given without --ranks", ["sink(1)", "--documents", 4096]),
        (2, "--window is given without --ranks", ["sink(1)", "--window", 8, 0]),
        (2, "ranks is -1: it must be from 1 to 4096", ["--ranks", -1]),
        (2, "cu_seqlens goes from 0 to 10: it must go from 0 to rows, 4096", ["--ranks", 2, "--documents", 10]),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_named(tmp_path, code, words, arguments):
    arguments = [str(x).format(folder=tmp_path) for x in arguments]
    if "-o" not in arguments:
        arguments += ["-o", tmp_path / "picture.svg"]
    assert words in run("draw", *arguments, code=code)
    assert not list(tmp_path.iterdir())
