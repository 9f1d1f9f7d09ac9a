"""Findings in words: kinds, prices, evidence, small charts."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from module_syntax import parsed

from stepscope.records.hang import HangKind
from stepscope.reports.evidence_text import evidence_rows, facts_sections, figure_text, flat_text, key_name
from stepscope.reports.finding_text import (
    KINDS,
    finding_document,
    findings_document,
    judged_text,
    kind_meaning,
    kind_name,
    nothing_text,
)

SOURCES = Path("src/stepscope")
COST = {"share": 0.6089, "seconds": 2.647, "rank_hours": 0.0029, "if_fixed": {"step_ms": 17.422, "speedup": 2.557}}


def text_of(*, over: bool = True, **fields: Any) -> dict[str, Any]:
    """The text of a finding with these fields."""
    usual = {"kind": "compute_straggler", "severity": "critical", "ranks": [], "steps": [3, 99], "cost": COST}
    found: dict[str, Any] = finding_document({**usual, "confidence": 0.97, **fields}, over=over)["text"]
    return found


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("excess_ms", 30.051, "30.1 ms"),
        ("excess_ms", -0.113, "−113 µs"),
        ("input_ms_per_step", 2, "2.00 ms per step"),
        ("bytes_per_step", 1_500_000, "1.4 MiB per step"),
        ("loss_share", 0.034, "3.4%"),
        ("cpu_pressure", 0.5, "50%"),
        ("util_percent", 41.5, "41.5%"),
        ("rtt_us", 850, "850 µs"),
        ("net_rx_bps", 2e6, "1.9 MiB/s"),
        ("net_errors_ps", 3, "3/s"),
        ("stood_s", 13.407, "13.4 s"),
        ("steps_used", 97, "97"),
        ("last_step", 12_345, "12,345"),
        ("z", 4.2, "4.20"),
        ("p", 0.00001, "1.0e-5"),
        ("excess_ms", float("nan"), "–"),
    ],
)
def test_the_suffix_of_a_key_gives_the_unit(key: str, value: float, text: str) -> None:
    assert figure_text(key, value) == text


def test_keys_become_words() -> None:
    keys = ("excess_ms", "peak_allocated_bytes", "own_cpu_percent", "toString", "x")
    assert [key_name(key) for key in keys] == ["longer by", "peak allocated", "own CPU", "toString", "x"]


def test_evidence_becomes_nested_rows() -> None:
    evidence = {
        "compared": "work",
        "median_ms_by_rank": {"0": 5.963, "2": 36.08},
        "excess_ms_by_phase": {"forward": 30.401, "between": -2},
        "wait_measured": True,
        "hosts": ["vm"],
        "place": None,
        "victims": [0, 2, 3, 4],
        "at": {"file": "a.py", "line": 3, "function": "f"},
    }
    assert [flat_text({key: value}) for key, value in evidence.items()] == [
        "what was compared work",
        "median by rank rank 0 5.96 ms, rank 2 36.1 ms",
        "longer by, per phase forward 30.4 ms, between steps −2.00 ms",
        "waiting was measured yes",
        "hosts vm",
        "",
        "waiting ranks 0 and 2–4",
        "place a.py:3 in f",
    ]
    values = {row["key"]: row["value"] for row in evidence_rows(evidence)}
    assert values["median_ms_by_rank"]["rows"][1] == {
        "key": "2",
        "name": "rank 2",
        "value": {"form": "text", "text": "36.1 ms"},
    }
    assert values["at"] == {"form": "text", "text": "a.py:3 in f"}


def test_similar_records_become_a_table_and_long_lists_are_cut() -> None:
    groups = [{"group": f"g{at}", "transfer_ms": at} for at in range(30)]
    [row] = evidence_rows({"groups": groups})
    assert (row["value"]["form"], row["value"]["columns"], row["value"]["left"]) == ("table", ["group", "transfer"], 6)
    assert row["value"]["rows"][2] == ["g2", "2.00 ms"]
    [row] = evidence_rows({"at_steps": list(range(100))})
    assert re.fullmatch(r"0, 1, .*, 23 and 76 more", row["value"]["text"])
    [row] = evidence_rows({"stopped_wall_ns": 10**18})
    assert row["value"] == {"form": "time", "wall_ns": 10**18}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
)
KEYS = ("kind", "severity", "ranks", "phase", "steps", "cost", "evidence", "confidence")


@settings(max_examples=examples(200))
@given(st.dictionaries(st.sampled_from(KEYS), json_values), st.booleans())
def test_any_document_is_put_into_words(finding: dict[str, Any], over: bool) -> None:
    """A summary may be of another version, or of anyone."""
    assert finding_document(finding, over=over)["text"]["look"] in ("critical", "warning", "info", "healthy")
    findings_document([finding, 3], finding, live=False, over=over)
    facts_sections(finding)


def test_endless_nesting_is_cut() -> None:
    deep: dict[str, Any] = {}
    at = deep
    for _ in range(500):
        at["inner"] = at = {}
    at["end"] = 1
    assert "…" in flat_text({"x": deep})


def test_settings_by_object() -> None:
    facts = {"loader": {"batch_size": 8}, "threads": 4, "mesh": {"shape": [2]}, "ddp": {}}
    assert [(section["title"], [row["name"] for row in section["rows"]]) for section in facts_sections(facts)] == [
        ("Data", ["batch size"]),
        ("Others", ["threads"]),
    ]


def test_the_price_has_the_words_of_the_summary() -> None:
    gain = "without it a step takes 17.4 ms instead of 44.5 ms on average, 2.56× as fast"
    assert text_of()["price"] == ["61% of the training time", "2.65 s", gain]
    assert text_of()["time_left"] == pytest.approx(1 / 2.557, abs=1e-4)
    assert text_of(over=False)["price"][1] == "2.65 s so far"
    assert text_of(cost={**COST, "rank_hours": 3.2})["price"][2] == "3.20 rank-hours"
    assert text_of(kind="healthy")["price"][0] == "at most 61% of the training time"
    assert text_of(cost={"share": 0.004, "seconds": 1})["price"] == []
    assert text_of(cost=None)["price"] == []
    least = {"share": 0.5, "seconds": 2.1, "if_fixed": {"step_ms": 22.25, "speedup": 2}}
    assert text_of(cost={**COST, "least": least})["price"][:2] == [
        "50% to 61% of the training time",
        "2.10 s to 2.65 s",
    ]


def test_the_price_of_a_stop_is_the_time_without_progress() -> None:
    hang = {"kind": "hang_input", "cost": {"share": 0.0, "seconds": 13.4}}
    assert (text_of(**hang)["price"], text_of(**hang)["time_left"]) == (["13.4 s without progress"], None)
    assert text_of(**hang, over=False)["price"] == []  # a clock beside it counts
    crash = {"kind": "rank_crashed", "cost": {"share": 0.3, "seconds": 75.0}, "evidence": {"checkpoint_step": 40}}
    assert text_of(**crash)["price"] == ["1 min 15 s of training is lost: the last checkpoint seen was in step 40"]


def test_facts_confidence_and_look() -> None:
    found = text_of(ranks=[3], phase="forward")
    assert found["facts"] == ["A rank computes more slowly", "rank 3", "forward", "steps 3–99"]
    assert [text_of(confidence=each)["confidence"] for each in (0.97, 0.8, 0.6, 0.2)] == [
        "nearly certain (97%)",
        "likely (80%)",
        "possible (60%)",
        "a guess (20%)",
    ]
    healthy = {"kind": "healthy", "severity": "info"}
    assert [text_of(**healthy, evidence={"large": large})["look"] for large in (False, True)] == ["healthy", "info"]
    assert text_of(kind="rank_crashed", steps=[40, 40])["facts"] == ["A rank died", "last complete step 40"]


def test_charts_show_the_culprit_among_its_peers_and_the_phases() -> None:
    evidence = {
        "compared": "work",
        "median_ms_by_rank": {"0": 6, "1": 6, "2": 36},
        "peers_median_ms": 6,
        "excess_ms_by_phase": {"forward": 30, "input": 0.01, "comm": -29},
    }
    ranks, phases = text_of(ranks=[2], evidence=evidence)["charts"]
    assert ranks["mark"] == {"value": 6, "name": "median of the others: 6.00 ms"}
    assert [(bar["name"], bar["tone"]) for bar in ranks["bars"]] == [
        ("rank 0", "plain"),
        ("rank 1", "plain"),
        ("rank 2", "culprit"),
    ]
    assert [(bar["name"], bar["text"]) for bar in phases["bars"]] == [("forward", "+30.0 ms"), ("comm", "−29.0 ms")]


def test_with_many_ranks_the_culprits_and_the_slowest_are_drawn() -> None:
    medians = {str(rank): 1 if rank == 50 else rank for rank in range(64)}
    [chart] = text_of(ranks=[50], evidence={"median_ms_by_rank": medians})["charts"]
    assert [bar["name"] for bar in chart["bars"]] == [f"rank {rank}" for rank in (50, *range(55, 64))]
    assert chart["note"] == "and 54 more ranks"


def test_memory_is_drawn_up_to_its_limit_and_slow_steps_at_their_positions() -> None:
    creep = {"first_bytes": 1e9, "last_bytes": 2e9, "bytes_per_step": 1e7, "runs_out_at_step": 200}
    [chart] = text_of(kind="memory_creep", steps=[0, 100], evidence=creep)["charts"]
    assert (chart["points"], chart["end"]["step"]) == ([[0, 1e9], [100, 2e9], [200, 3e9]], 200)
    [chart] = text_of(kind="jitter", steps=[20, 295], evidence={"at_steps": [20, 45, 295]})["charts"]
    assert (chart["form"], chart["first"], chart["last"]) == ("strip", 20, 295)
    [chart] = text_of(kind="change_point", evidence={"before_ms": 39, "after_ms": 80})["charts"]
    assert [(bar["name"], bar["tone"]) for bar in chart["bars"]] == [("afterwards", "culprit"), ("before", "plain")]


def test_on_what_the_findings_are_based() -> None:
    judged = {"first_step": 12, "step": 260, "ranks": 8, "of_ranks": 8}
    assert judged_text(judged, []).startswith("Based on steps 12 to 260, 8 ranks. A finding appears")
    hang = {"kind": "hang_host", "evidence": {"over": None}}
    assert judged_text({**judged, "first_step": None, "ranks": 2}, [hang]) == (
        "Based on data up to step 260, the last that ended, 2 of 8 ranks."
    )


def test_without_findings() -> None:
    usual = {"over": False, "ranks": 2, "world_size": 2, "steps": 4}
    assert nothing_text(**usual, collecting="Collecting: 3 of 10 steps.")[0] == "Collecting: 3 of 10 steps."
    assert nothing_text(**usual)[0] == "Nothing wrong so far."
    assert nothing_text(**{**usual, "over": True}) == (
        "Nothing was found.",
        "The recorded steps of 2 ranks show no problem.",
    )
    assert nothing_text(**{**usual, "steps": 0, "world_size": 4})[0] == "2 of 4 ranks, no steps yet."
    assert nothing_text(**{**usual, "ranks": 0})[0] == "No rank has reported yet."
    assert nothing_text(**{**usual, "ranks": 0, "over": True})[0] == "Nothing was recorded."


def constants(root: Path, folder: str) -> set[str]:
    """All strings of the sources."""
    found = set()
    for path in (root / SOURCES / folder).rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch("[a-z0-9_]+", node.value)
            ):
                found.add(node.value)
    return found


def test_every_kind_of_finding_has_a_name_and_a_meaning(root: Path) -> None:
    families = (root / "docs/diagnosis.md").read_text().partition("| family |")[2].partition("\n\n")[0]
    assert set(KINDS) == set(re.findall(r"`([a-z0-9_]+)`", families))
    assert set(get_args(HangKind)) <= set(KINDS)
    assert set(KINDS) - set(get_args(HangKind)) <= constants(root, "diagnosis")
    sources = "\n".join(path.read_text() for path in (root / SOURCES / "diagnosis").rglob("*.py"))
    assert set(re.findall(r'kind="([a-z0-9_]+)"', sources)) - {"stable"} <= set(KINDS)


def test_hangs_that_are_over_are_in_the_past() -> None:
    present = re.compile(r"\b(hangs?|waits?|is|are|has|does|holds|can)\b")
    past = [f"{kind_name(kind, over=True)}. {kind_meaning(kind, over=True)}" for kind in get_args(HangKind)]
    assert [text for text in past if present.search(text)] == []
    assert (kind_name("hang_deadlock"), kind_name("hang_deadlock", over=True)) == (
        "Ranks wait for each other",
        "Ranks waited for each other",
    )
    assert kind_name("jitter", over=True) == KINDS["jitter"][0]
    assert kind_name("of_tomorrow") == "of tomorrow"
