"""The demo's first page on made-up figures: what it says, in which words, and what it leaves out."""

import json
import re

from report_kit import ERRORS, TIMES, check_page, made_up_memory, shown, small_report, time_point

from scripts.demo import html, laws, parts, recommend, sweep
from scripts.demo.progress import NO_MEMORY, OUT_OF_TIME


def left_out(why, count=1, length=None, stage=sweep.STAGE):
    return {"stage": stage, "what": f"<{why}>", "why": why, "count": count, "length": length}


def head(content):
    """What stands before the first section."""
    return shown(content).split("What to use at each length")[0]


def test_page_is_whole_and_escapes_what_it_is_given():
    report = small_report()
    page = check_page(html.page(report))
    text = "".join(page.text)
    assert (
        "A <processor> & more" in text
        and "out of <time>" in text
        and "<processor>" not in [tag for tag, _ in page.seen]
    )
    assert (
        "first 450 of these tokens" in text and "last 64 were run" in text and "2.50×" in text
    )  # 0.04 s against 0.016 s
    assert sum(tag == "svg" for tag, _ in page.seen) >= 10
    json.dumps(report, allow_nan=False)


def test_page_of_a_run_that_measured_almost_nothing_has_no_empty_cards():
    report = small_report()
    for key in ("encoder", "memory", "errors", "limits", "ratios", "ratios_one_head"):
        report[key] = []
    report["sweep"] |= {
        key: [] for key in ("length", "one_head", "batch", "heads", "head_size", "batches", "best_batch")
    }
    report["laws"] = {"fits": [], "fits_one_head": [], "score_buffer": laws.check_score_buffer([])}
    report["recommendation"] = {"rows": [], "lower_precision": recommend.lower_precision([], 1e-2)}
    text = shown(html.page(report))
    for title in (
        "What to use",
        "Against length",
        "A real encoder",
        "The longest sequence",
        "One thing at a time",
        "Best batch",
    ):
        assert title not in text, title
    assert "Conditions" in text
    report["lowbit"] = {"policies": [], "study": {}}
    text = shown(html.lowbit(report))
    assert "format by format" not in text and "One linear layer" not in text and "Conditions" in text


def test_what_is_left_out_is_told_on_top_with_the_cure():
    report = small_report()
    report["left_out"] = [
        left_out(OUT_OF_TIME, 80),
        left_out(NO_MEMORY, 4),
        left_out(OUT_OF_TIME),
        left_out("a reason", 2),
    ]
    top = head(html.page(report))
    assert (
        "87 measurements were left out or cut short: 81 for want of time (60 s were allowed; make demo BUDGET=120"
        in top
    )
    assert "4 because they need more memory than is free here" in top and "2 for reasons that are listed" in top
    page = check_page(html.page(report))
    assert {a.get("href") for tag, a in page.seen if tag == "a"} == {html.LOWBIT, "#left-out"}
    assert "a reason" in "".join(page.text)

    report["left_out"] = []
    assert "left out" not in shown(html.page(report)) and 'href="#left-out"' not in html.page(report)
    report["left_out"] = [left_out(OUT_OF_TIME)]
    assert "1 measurement was left out or cut short for want of time (60 s were allowed" in head(html.page(report))


def test_what_to_use_says_where_it_ends_and_why():
    report = small_report()
    assert "The list ends" not in shown(html.page(report))
    report["settings"]["lengths"] = [128, 256, 512, 4096, 8192]
    report["left_out"] = [
        left_out(NO_MEMORY, 1, 256, "memory"),
        left_out(OUT_OF_TIME, 4, 4096),
        left_out(OUT_OF_TIME, 4, 8192),
    ]
    assert "The list ends at length 512. Not measured: 256, 4096, 8192 (out of time)." in shown(html.page(report))


def test_a_length_without_measured_errors_is_not_called_inaccurate():
    report = small_report()
    report["recommendation"]["rows"] = recommend.recommend(TIMES, [], 1e-2)
    text = shown(html.page(report))
    assert "errors were not measured" in text and "that accurate" not in text and "not accurate enough" not in text
    report["recommendation"]["rows"] = recommend.recommend(TIMES, ERRORS, 1e-9)
    assert "nothing measured is that accurate" in shown(html.page(report))


def test_torch_stands_beside_the_baseline_in_title_tile_and_choices():
    report = small_report()
    title = (
        "At length 1024 in fp32, flash has 1.25× the speed of torch and 2.50× the speed of our own baseline, and needs"
    )
    assert title in head(html.page(report))
    times = [*TIMES, time_point("torch", "float32", 512, 3e-3)]
    report["sweep"]["length"] = times
    top = head(html.page(report))
    assert (
        "1.50×the speed of torch fp32, 4.50× that of baseline fp32, at length 512 with what is best there: flash bf16"
        in top
    )
    assert "1.50× torch fp32" in shown(html.page(report)).split("What to use")[1]
    longer = dict(report["recommendation"]["rows"][-1], length=4096)  # flash alone was timed there
    report["recommendation"]["rows"].append(longer)
    assert "1.50×the speed of torch fp32" in head(html.page(report)) and "length 4096 with what" not in top
    report["ratios"] = laws.compare_methods(TIMES, made_up_memory())  # torch was not timed
    assert "flash has 2.25× the speed of our own baseline" in head(html.page(report))
    report["ratios"] = laws.compare_methods([p for p in times if p["method"] != "baseline"], made_up_memory())
    assert "flash has 0.75× the speed of torch" in head(html.page(report)) and "less scratch" not in head(
        html.page(report)
    )


def test_the_longest_sequence_is_called_computed_where_it_was_not_tried():
    report = small_report()
    assert "Computed, not tried; such a call would take 17.8 h" in head(html.page(report))
    text = shown(html.page(report)).split("The longest sequence that fits")[1]
    assert "a call would take" in text and "yes, below" in text
    del report["limits"][0]["inside"], report["limits"][0]["beyond"]
    report["limits"][0] |= {"whole_call_seconds": None, "free_call_seconds": None}
    text = shown(html.page(report))
    assert "yes, below" not in text and "not timed" in text and "Tried under" not in text and "such a call" not in text


def test_words_are_explained_before_they_are_used():
    report = small_report()
    text = shown(html.page(report))
    for word, meaning in (
        ("flash", "Heddle's attention"),
        ("baseline", "whole matrix of scores in memory"),
        ("torch", "scaled_dot_product_attention"),
    ):
        assert meaning in text.split("What to use")[0], word
    assert "pieces of one or more paragraphs" in text and "The reference: embeddings of 64 pieces" in text
    low = shown(html.lowbit(report))
    for jargon in ("golden", "Golden", "policy", "policies", "early study"):
        assert jargon not in text + low, jargon


def test_numbers_are_written_in_one_way():
    report = small_report()
    text = shown(html.page(report))
    assert "1.8·10⁻⁷" in text and "2e-07" not in text and "e-7" not in text
    assert not any(re.search(r"×\d", c["measured"] + c["holds_if"]) for c in report["claims"])  # 1.20×, never ×1.2


def test_noise_is_shown():
    report = small_report()
    content = html.page(report)
    text = shown(content)
    # Points have medians 1.25 times their least, and 2 times at length 1024.
    assert "took 1.25× the least at a typical point, 2.00× at the worst (baseline fp32 at 1024, 3 rounds)" in text
    assert "40 msmedian 80 ms of 3 rounds" in text and 'class="whisker"' in content
    assert "median 180 of 2 rounds" in text  # tokens a second of the encoder
    assert (
        parts.rounds_text(1.0, 1) == "1 round"
        and parts.spread_text([time_point("flash", "float32", 128, 1.0, rounds=1)]) == ""
    )
    assert "not equally free" not in text


def test_runs_whose_unchanged_parts_differ_are_flagged():
    report = small_report()
    slow = report["encoder"][1]["stages"] = {stage: t * 1.8 for stage, t in report["encoder"][1]["stages"].items()}
    assert (
        "what is the same code took longer with flash fp32 than with baseline fp32 (embedding 1.80×, linear 1.80×, "
        "norm and activation 1.80×, pooling 1.80×)."
    ) in shown(html.page(report))
    assert "the machine was not equally free in its runs" in head(html.page(report))
    report["encoder"][1]["stages"] = dict(slow, embedding=0.1, linear=1.1 * 1.2, norm_and_activation=0.1, pooling=0.1)
    assert "not equally free" not in shown(html.page(report))


def test_laws_say_when_they_were_not_measured_and_claims_when_they_hold():
    report = small_report()
    text = shown(html.page(report))
    assert "The baseline's score buffer is 4·B·H·S² bytes: holds (it must within 1 %" in text and "not measured" in text
    assert "holds if" in text and "at least 32.0×, 0.8 of it" in text
    report["laws"] |= {"score_buffer": laws.check_score_buffer(made_up_memory(lengths=(1024, 2048)))}
    assert "4·B·H·S² bytes: not measured" in shown(html.page(report))


def test_the_answer_on_lower_precision_can_be_read():
    report = small_report()
    question = "Is bf16 worth it at lengths up to 256? "
    assert (
        question + "No. Its speed over fp32, the faster method of each: 0.52× at length 128 (error 5.0·10⁻³)."
        in shown(html.page(report))
    )
    lower = report["recommendation"]["lower_precision"]
    lower["lengths"] = [
        dict(lower["lengths"][0], length=s, faster=f, pays=f > 1.05) for s, f in ((128, 1.0), (192, 1.3), (256, 1.4))
    ]
    assert question + "At length 192 and 256 only." in shown(html.page(report))
    lower["worth_it"] = True
    assert question + "Yes." in shown(html.page(report))


def test_where_the_time_went_is_a_table_and_the_build_is_apart():
    report = small_report()
    text = shown(html.page(report))
    assert "in 12 s for both pages; the build before took 95 s, which is not counted" in head(html.page(report))
    assert (
        "time & more3 s4 s" in text
        and "measuring, in all12 s60 s" in text
        and "building, before it95 snot counted" in text
    )
    report["build_seconds"] = None
    text = shown(html.page(report))
    assert "the build before" not in text and "building, before it" not in text
