"""What a study of FP4 layers reported, beside what was measured here."""

from __future__ import annotations

from .claims import SLACK, row
from .units import bytes_text, seconds_text, times_text

KEPT = 88.69  # percent of a layer's output
NEAR = 0.1  # percent by which that may differ
FASTER_BLOCK = 0.9  # of the reported factor is enough: most of a block is other code


def claims(found: dict) -> list[dict]:
    """Rows as claims.row makes them; `found` as lowbit.study returns it."""
    return [
        *_layer({(e["format"], e["rule"]): e["kept"] for e in found.get("layer", [])}),
        *_speed(found.get("speed")),
        _block(found.get("block")),
        _attention(found.get("attention")),
        _decomposed(found.get("speed")),
    ]


def _layer(kept: dict) -> list[dict]:
    one = kept.get(("e2m1_row", "plain"))
    said = one and (
        f"{one:.2f} %; nvfp4 with searched scales {kept['nvfp4', 'mse']:.2f} %, int8_row "
        f"{kept['int8_row', 'plain']:.2f} %"
    )
    claim = f"E2M1 with one scale a row keeps {KEPT} % of a layer's output"
    return [row(claim, said, f"within {NEAR} % of that", one and abs(one - KEPT) <= NEAR)]


def _speed(speed: dict | None) -> list[dict]:
    faster = speed and speed["torch"] / speed["fp4"]
    saved = speed and 100 * (1 - speed["packed_bytes"] / speed["float_bytes"])
    halved = speed and 100 * (1 - 2 * speed["packed_bytes"] / speed["float_bytes"])
    return [
        row(
            "An FP4 layer is 2.57× as fast as torch's in float32",
            speed
            and f"{times_text(faster)}: {seconds_text(speed['fp4'])} against {seconds_text(speed['torch'])} for "
            f"{speed['rows']} rows, both warm, in float32. So many rows are bound by arithmetic, which no format of "
            "weights saves",
            f"at least {times_text(SLACK * 2.57)}, {SLACK:g} of it",
            speed and faster >= SLACK * 2.57,
        ),
        row(
            "FP4 weights take 87.5 % less memory",
            speed
            and f"{saved:.1f} % less than float32 with scales and packing counted; {halved:.1f} % less than 16 bits",
            "86.5 to 88.5 %",
            speed and abs(saved - 87.5) <= 1,
        ),
    ]


def _block(block: dict | None) -> dict:
    gain = block and {
        key: block["torch"]["seconds"] / block[key]["seconds"] for key in ("float32", "e2m1_row", "nvfp4")
    }
    return row(
        "A Transformer block with FP4 feed-forward is 1.36× as fast and keeps 94.5 %",
        block
        and f"{times_text(gain['e2m1_row'])} and {block['e2m1_row']['kept']:.2f} % of torch.nn.TransformerEncoderLayer "
        f"in eval mode (norm first, float32, {block['batch']} × {block['length']} tokens, hidden {block['hidden']}; "
        f"e2m1_row); nvfp4 {times_text(gain['nvfp4'])} and {block['nvfp4']['kept']:.2f} %, heddle.nn.TransformerBlock "
        f"in float32 {times_text(gain['float32'])}",
        f"at least {times_text(FASTER_BLOCK * 1.36)}, {FASTER_BLOCK:g} of it, and 94.4 %",
        block and gain["e2m1_row"] >= FASTER_BLOCK * 1.36 and block["e2m1_row"]["kept"] >= 94.4,
    )


def _attention(held: dict | None) -> dict:
    less = held and 100 * (1 - held["flash"] / held["baseline"])
    return row(
        "Tiled attention takes 35.5 % less memory",
        held
        and f"{less:.1f} % less: {bytes_text(held['flash'])} instead of {bytes_text(held['baseline'])} with the whole "
        f"score matrix (batch {held['batch']}, {held['heads']} heads, length {held['length']}, head size "
        f"{held['head_size']}, q, k and v included)",
        "at least 35.5 %",
        held and less >= 35.5,
    )


def _decomposed(speed: dict | None) -> dict:
    slower = speed and speed["svd"] / speed["product"]
    return row(
        "Taking W apart by singular values at each call is far slower than the product",
        speed
        and f"{times_text(slower)} the time: {seconds_text(speed['svd'])} against {seconds_text(speed['product'])} for "
        f"{speed['few']} rows, rank 192 of 768",
        "more than 10 times the time",
        speed and slower > 10,
    )
