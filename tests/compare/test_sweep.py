"""The result of a sweep: speeds, the front, and failures, from trials that are given exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from made_sweeps import variant

from stepscope.comparison.sweep import front_svg, sweep_document, sweep_page, sweep_sentences, sweep_table


def places(document: dict[str, Any]) -> dict[str, str]:
    return {row["variant"]: row["front"] for row in document["variants"]}


def test_the_front_has_what_is_faster_or_smaller_than_all_others() -> None:
    document = sweep_document(
        "fsdp2",
        [
            variant("fast", [10.0, 10.1, 9.9], 800),
            variant("small", [20.0, 20.1, 19.9], 200),
            variant("between", [14.0, 14.1, 13.9], 400),
            variant("bad", [21.0, 21.1, 20.9], 400),
            variant("oom", [], None, failed="out of memory"),
        ],
        rounds=3,
    )
    assert document["front"] == ["small", "between", "fast"]
    assert places(document) == {
        "fast": "front", "small": "front", "between": "front", "bad": "dominated", "oom": "none",
    }  # fmt: skip
    assert document["complete"] is True
    assert document["unit"] == "steps/s"
    fast, *_, bad, oom = document["variants"]
    assert fast["speed"] == pytest.approx(100.0, rel=0.001)
    assert fast["speed_interval"][0] < 100 < fast["speed_interval"][1]
    assert (oom["status"], oom["speed"], oom["memory"]) == ("out of memory", None, None)
    assert bad["better"] == "small"
    assert sweep_sentences(document) == [
        f"Fastest: fast, {sweep_table(document)[0][2]}, 800 MiB.",
        "Least memory: small, 200 MiB, at 50% of that speed.",
        "oom failed: out of memory.",
    ]
    assert sweep_table(document)[-1] == ("oom", "out of memory", "", "", "", "")


def test_what_slows_a_whole_round_is_no_noise() -> None:
    """The second round is 30% slower for all: the interleaving takes that out."""
    drift = (1.0, 1.3, 1.0)
    calm = sweep_document(
        "x",
        [variant("a", [10 * by for by in drift], 100), variant("b", [10.3 * by for by in drift], 100)],
        rounds=3,
    )
    assert calm["noise"] < 0.005
    assert places(calm) == {"a": "front", "b": "dominated"}


def test_a_difference_within_noise_decides_nothing() -> None:
    document = sweep_document(
        "x", [variant("a", [10.0, 11.5, 9.0], 100), variant("b", [10.4, 9.2, 11.9], 100)], rounds=3
    )
    assert places(document) == {"a": "front", "b": "near"}
    low, high = document["variants"][0]["speed_interval"]
    assert low < 100 < high


def test_variants_with_more_samples_per_step_are_compared_by_samples() -> None:
    document = sweep_document(
        "x", [variant("4", [10.0] * 2, 100, samples=4), variant("16", [20.0] * 2, 200, samples=16)], rounds=2
    )
    assert document["unit"] == "samples/s"
    assert [row["speed"] for row in document["variants"]] == [pytest.approx(400), pytest.approx(800)]
    assert document["front"] == ["4", "16"]


def test_an_unfinished_sweep_says_so_and_uses_what_it_has() -> None:
    document = sweep_document(
        "x", [variant("a", [10.0, 10.1], 100), variant("b", [12.0], 90), variant("c", [], None)], rounds=2
    )
    assert document["complete"] is False
    assert [row["status"] for row in document["variants"]] == ["finished", "1 of 2 rounds", "not run yet"]
    assert sweep_sentences(document)[-1] == "The sweep is not complete; the same command runs what is missing."


def test_a_variant_that_failed_once_keeps_its_speed_and_says_so() -> None:
    document = sweep_document("x", [variant("a", [10.0, 10.1], 100, failed="timed out")], rounds=3)
    (row,) = document["variants"]
    assert (row["status"], row["front"]) == ("timed out in 1 of 3 rounds", "front")
    assert document["complete"] is True


def test_the_picture_is_valid_and_shows_every_variant() -> None:
    name = '<b>"&'
    variants = [variant(name, [10.0], 100), variant("b", [12.0], 50), variant("c", [], None, failed="exception")]
    for shown in (variants, variants[2:], []):
        picture = ElementTree.fromstring(front_svg(sweep_document("x", shown, rounds=1)))
        text = " ".join(picture.itertext())
        assert all(listed.name in text for listed in shown)


# -- page -------------------------------------------------------------------------------------------------------------


def test_the_page_has_the_front_by_time_and_memory() -> None:
    fast = variant("fast", [10.0, 10.1, 9.9], 800, samples=4)
    settings = {"args": ["--wrap", "a b"], "env": {"NCCL_ALGO": "Ring"}, "options": ["--no-html"]}
    small = variant("small", [40.0, 40.2, 39.8], 200, samples=8)
    oom = variant("oom", [], None, samples=64, failed="out of memory")
    document = sweep_document("fsdp2", [replace(fast, settings=settings), small, oom], rounds=3)
    page = sweep_page(document, {"fast": "fast-3"})
    assert (page["kind"], page["name"], page["complete"]) == ("sweep", "fsdp2", True)
    assert page["facts"] == ["3 variants", "3 rounds"]
    verdict = page["verdict"]
    assert (verdict["look"], verdict["title"]) == ("info", sweep_sentences(document)[0])
    assert verdict["sides"][0]["items"] == [["Least memory: small, 200 MiB, at 50% of that speed.", ""]]
    front, tables = page["parts"]
    assert (front["form"], front["title"], front["up"]) == ("front", "Memory and time per sample", "time per sample")
    assert front["across"] == "peak memory of a process (largest rank)"
    assert front["failed"] == [["oom", "out of memory"]]
    assert [(point["name"], point["place"], point["run"]) for point in front["points"]] == [
        ("small", "front", None),
        ("fast", "front", "fast-3"),
    ]
    assert [point["ns"] for point in front["points"]] == [
        pytest.approx(5e6, rel=0.001),
        pytest.approx(2.5e6, rel=0.001),
    ]
    for point in front["points"]:
        low, high = point["interval_ns"]
        assert low < point["ns"] < high
    assert front["label"].endswith("oom failed: out of memory.")
    (table,) = tables["tables"]
    assert table["heads"] == ["variant", "front", "samples/s", "interval", "step", "memory", "status", "settings"]
    names = [row[0] for row in table["rows"]]
    assert names == ["fast", "small", "oom"]
    assert table["rows"][0][-1] == "NCCL_ALGO=Ring --no-html --wrap 'a b'"
    assert table["rows"][2][2:7] == [["", None], "", ["", None], ["", None], "out of memory"]


def test_the_page_of_a_sweep_without_a_result() -> None:
    nothing = sweep_page(sweep_document("x", [variant("a", [], None), variant("b", [], None, failed="x")], rounds=1))
    assert nothing["verdict"]["title"] == "The sweep is not complete; the same command runs what is missing."
    assert (nothing["verdict"]["look"], nothing["complete"]) == ("warning", False)
    assert nothing["parts"][0]["points"] == []
    failed = sweep_page(sweep_document("x", [variant("b", [], None, failed="timed out")], rounds=1))
    assert failed["verdict"]["title"] == "No variant was measured."
    assert failed["parts"][0]["failed"] == [["b", "timed out"]]
    assert sweep_page(sweep_document("x", [], rounds=1))["parts"][0]["points"] == []


def test_without_memory_there_is_a_table_and_no_point() -> None:
    page = sweep_page(sweep_document("x", [variant("a", [10.0], None)], rounds=1))
    assert page["verdict"]["title"] == "The memory of the variants is not known, so there is no front."
    assert (page["parts"][0]["points"], page["parts"][0]["title"]) == ([], "Memory and time per step")
    assert page["parts"][1]["tables"][0]["rows"][0][0] == "a"
