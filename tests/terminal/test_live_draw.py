"""Whatever a hub says and however large the terminal is: as many lines as there is room for, none too wide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from example_counts import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from stepscope.terminal.documents import (
    Event,
    Finding,
    Findings,
    FindingText,
    GpuFigures,
    HostFigures,
    Identity,
    Info,
    Judged,
    Levels,
    Machines,
    Output,
    Rank,
    RankNow,
    Ranks,
    RankSteps,
    Run,
    Sample,
    Samples,
    Snapshot,
    Status,
    StepRow,
    Verdict,
    Window,
)
from stepscope.terminal.drawing import draw_phases, draw_rank, draw_ranks, draw_step_time, mean_times
from stepscope.terminal.feed import GPU_FIELDS, HOST_FIELDS, PROCESS_FIELDS
from stepscope.terminal.screen import ViewState, draw_keys, draw_machine, draw_screen, draw_verdict

words = st.text(max_size=30) | st.sampled_from(["[red]x[/]", "\x1b[2J", "漢字" * 10, "\u202e", "a b " * 40, ""])
numbers = st.floats(-1e30, 1e30) | st.integers(-5, 5).map(float) | st.floats(0, 1e9)
whole = st.integers(-3, 1 << 70)
names = st.sampled_from(["wall", "work", "comm", "forward", "other", "mine"]) | words
severities = st.sampled_from(["critical", "warning", "info", "odd"])
levels = st.dictionaries(names, numbers, max_size=6)


def tuples(inner: Any, most: int = 4) -> Any:
    return st.lists(inner, max_size=most).map(tuple)


columns = st.dictionaries(names, st.lists(numbers, max_size=5), max_size=5)
tables = st.builds(
    Ranks,
    total=whole,
    start=whole,
    order=st.sampled_from(["work", "rank"]),
    rank=tuples(whole),
    host=tuples(words),
    state=tuples(st.sampled_from(["running", "vanished", "odd"])),
    live_phase=tuples(st.none() | words),
    live_since_wall_ns=tuples(whole),
    mean_ns=columns,
)
statuses: dict[str, Any] = {
    "status": words,
    "over": st.booleans(),
    "attempt": whole,
    "world_size": whole,
    "ranks": whole,
    "live_ranks": whole,
    "hung_ranks": whole,
    "hung_steps": st.none() | st.tuples(whole, whole),
    "ranks_text": words,
    "step": whole,
}
FIGURES = (*GPU_FIELDS.split(","), *HOST_FIELDS.split(","), *PROCESS_FIELDS.split(","))
samples = st.builds(
    Samples,
    left_out=whole,
    series=tuples(
        st.builds(
            Sample,
            rank=st.none() | whole,
            values=st.dictionaries(
                st.sampled_from(
                    [
                        "cpu_percent",
                        "mem_total",
                        "mem_available",
                        "mem_used",
                        "util_percent",
                        "power_w",
                        "rss",
                        "rss_file",
                    ]
                ),
                st.lists(st.none() | numbers, max_size=3),
            ),
        )
    ),
)
level = st.none() | st.builds(Levels, median=st.none() | numbers, max=st.none() | numbers)
machines = st.builds(
    Machines,
    gpus=tuples(
        st.builds(
            GpuFigures,
            in_use=st.booleans(),
            util_percent=level,
            power_w=level,
            temperature_c=level,
            mem_used_max=st.none() | numbers,
            mem_total=st.none() | numbers,
        )
    ),
    nodes=tuples(
        st.builds(HostFigures, cpu_percent=level, mem_total=st.none() | numbers, mem_available_min=st.none() | numbers)
    ),
)
events = st.builds(Event, number=whole, wall_ns=whole, event=words, text=words, severity=severities)
snapshots = st.builds(
    Snapshot,
    link=st.sampled_from(["opening", "live", "lost", "refused", "missing", "over", "ended"]),
    why=words,
    run=st.none() | st.builds(Run, name=words, **statuses),
    status=st.none() | st.builds(Status, **statuses),
    findings=st.none()
    | st.builds(
        Findings,
        verdict=st.none()
        | st.builds(
            Verdict,
            kind=st.sampled_from(["healthy", "x"]),
            severity=severities,
            look=st.sampled_from(["healthy", "odd"]),
            title=words,
            price=st.none() | words,
            advice=tuples(words),
        ),
        findings=tuples(
            st.builds(
                Finding,
                severity=severities,
                title=words,
                ranks=tuples(st.integers(-1, 9)),
                advice=tuples(words),
                text=st.builds(FindingText, look=severities, facts=tuples(words), price=tuples(words)),
            )
        ),
        nothing=tuples(words, 2),
        judged=st.builds(Judged, text=words),
    ),
    steps=tuples(
        st.builds(
            StepRow,
            first=whole,
            last=whole,
            start_wall_ns=whole,
            mean_ns=levels.map(lambda found: {"wall": 1.0, **found}),
            memory_bytes=st.dictionaries(st.sampled_from(["allocated", "peak_allocated"]), numbers),
        )
    ),
    events=tuples(events),
    ranks=st.none() | tables,
    slowest=st.none() | tables,
    rank=st.none()
    | st.builds(
        Rank,
        rank=st.just(3),
        identity=st.builds(Identity, host=words, device_name=words),
        now=st.builds(RankNow, state=words, live_phase=st.none() | words),
        mean_ns=levels,
        steps=st.builds(
            RankSteps,
            wall_ns=tuples(numbers),
            memory_bytes=st.dictionaries(st.just("allocated"), st.lists(st.none() | numbers, max_size=3)),
        ),
    ),
    gpus=st.none() | samples,
    machines=st.none() | machines,
    processes=st.none() | samples,
    stepped_wall_ns=whole,
    hosts=st.none() | samples,
    output=st.none() | st.builds(Output, path=words, text=st.binary(max_size=60), size=st.integers(0, 1 << 60)),
    seen_wall_ns=whole,
)
views = st.builds(
    ViewState,
    pane=st.sampled_from(["ranks", "rank", "findings", "output", "events", "help"]),
    cursor=st.integers(0, 5),
    start=st.integers(0, 5),
    rank=st.none() | st.just(3),
)


@settings(max_examples=examples(40), phases=(Phase.explicit, Phase.generate))
@given(snapshots, views, st.integers(1, 220), st.integers(1, 70), st.booleans())
def test_it_always_fits(known: Snapshot, view: ViewState, width: int, height: int, frozen: bool) -> None:
    drawn = draw_screen(known, view, width, height, frozen=frozen, now_wall_ns=1 << 60)
    assert len(drawn.lines) == height
    for line in drawn.lines:
        assert line.plain.isprintable()
        assert cell_len(line.plain) <= width, line.plain
    assert 0 <= drawn.rows <= height


SECOND_NS = 1_000_000_000


def going(**more: Any) -> Snapshot:
    """Eleven steps of 100 ms, of 200 ms from the start of one to the next; the last ended at 12.1 s."""
    steps = [
        StepRow(
            first=at, last=at, mean_ns={"wall": 1e8}, memory_bytes={}, start_wall_ns=10 * SECOND_NS + at * 2 * 10**8
        )
        for at in range(11)
    ]
    return Snapshot(**{"link": "live", "run": Run(), "status": Status(ranks=2), "steps": tuple(steps), **more})


def test_a_rank_that_hangs_does_not_read_as_running() -> None:
    table = Ranks(
        total=6,
        rank=(0, 1, 2, 3, 4, 5),
        host=("a",) * 6,
        state=("running", "running", "exception", "running", "vanished", "exited"),
        hang_state=("waits in all_reduce", None, None, "hung", None, None),
    )
    lines = [line.plain.split() for line in draw_ranks(going(ranks=table), 80, 9, cursor=0, start=0, order="rank")[1:]]
    assert [line[-4] for line in lines] == ["waits", "running", "error", "hung", "vanished", "exited"]
    now = RankNow(state="running", hang_state="waits in all_reduce", last_step=7)
    about = going(rank=Rank(rank=0, identity=Identity(host="a", pid=9, device="cpu"), now=now))
    assert draw_rank(about, 80, 4, rank=0)[0].plain == "Rank 0  a · pid 9 · cpu · waits in all_reduce · step 7"


PHASES_MS = {
    "forward": 25.0,
    "backward": 54.0,
    "comm": 16.0,
    "optimizer": 6.0,
    "eval": 3.0,
    "checkpoint": 1.0,
    "other": 2.0,
}


def test_no_phase_that_counts_is_left_out_without_a_word() -> None:
    mean = {name: took * 1e6 for name, took in {"wall": 107.0, **PHASES_MS}.items()}
    known = replace(going(), steps=(StepRow(first=0, last=0, mean_ns=mean, memory_bytes={}),))

    def drawn(height: int, known: Snapshot = known) -> list[list[str]]:
        return [line.plain.split()[:4] for line in draw_phases(known, 80, height)[1:]]

    assert [row[0] for row in drawn(8)] == ["forward", "backward", "comm", "optimizer", "eval", "checkpoint", "other"]
    assert [row[0] for row in drawn(7)] == ["forward", "backward", "comm", "optimizer", "eval", "other"]  # 1%
    assert [row[0] for row in drawn(6)[:-1]] == ["forward", "backward", "comm", "optimizer"]
    assert drawn(6)[-1] == ["+3", "more", "6.00", "ms"]
    assert [row[0] for row in drawn(3)] == ["forward", "backward"]


def test_times_of_the_host_are_called_so_where_devices_are_timed() -> None:
    for timed, head in ((False, "phase  "), (True, "host phase ")):
        step = StepRow(
            first=0,
            last=0,
            mean_ns={"wall": 2e6, "forward": 1e6},
            memory_bytes={},
            device_ns={"forward": 1e6} if timed else {},
        )
        known = replace(going(), steps=(step,), rank=Rank(rank=0, mean_ns={"forward": 1e6}))
        assert draw_phases(known, 80, 4)[0].plain.startswith(head)
        assert any(line.plain.startswith(head) for line in draw_rank(known, 80, 20, rank=0))


def test_few_ranks_leave_their_lines_to_the_phases() -> None:
    mean = {name: took * 1e6 for name, took in {"wall": 107.0, **PHASES_MS}.items()}
    for ranks, named in ((2, 7), (64, 4)):
        table = Ranks(total=ranks, order="work", rank=(0, 1), host=("a", "a"), state=("running",) * 2)
        step = StepRow(first=0, last=0, mean_ns=mean, memory_bytes={})
        known = replace(going(ranks=table, status=Status(ranks=ranks)), steps=(step,))
        lines = [line.plain for line in draw_screen(known, ViewState(), 80, 24).lines]
        assert [sum(line.startswith(f"{name} ") for line in lines) for name in PHASES_MS].count(1) == named
        assert any(line.startswith("+3 more ") for line in lines) is (named == 4)
        assert sum(" a  " in line and "running" in line for line in lines) == 2


def test_a_rate_only_while_steps_come() -> None:
    def drawn(known: Snapshot, now_s: float) -> str:
        return draw_step_time(known, 80, now_wall_ns=int(now_s * SECOND_NS)).plain.split("▁")[0].rstrip()

    assert drawn(going(), 13.0) == "step      100 ms  median of 11, mean of ranks  5.0/s"
    assert drawn(going(), 86.1) == "step      100 ms  median of 11  no step for 1 min 14 s"
    # Steps that came are believed before the clock of another machine.
    assert drawn(going(stepped_wall_ns=85 * SECOND_NS), 86.1).endswith("  5.0/s")
    assert drawn(going(stepped_wall_ns=85 * SECOND_NS), 96.0).endswith("  no step for 11 s")
    assert drawn(going(status=Status(ranks=2, over=True)), 86.1) == "step      100 ms  median of 11, mean of ranks"
    assert drawn(going(link="lost"), 86.1) == "step      100 ms  median of 11, mean of ranks"
    window = Run(info=Info(window=Window(steps=2, stride=2)))
    assert drawn(going(run=window, status=Status(ranks=1)), 13.0) == "step      100 ms  median of 4 steps  5.0/s"


def test_steps_known_only_several_together_are_weighed_and_have_no_median() -> None:
    rows = tuple(
        StepRow(first=first, last=last, mean_ns={"wall": took, "forward": took / 2}, memory_bytes={})
        for first, last, took in ((0, 0, 100e6), (1, 2, 40e6), (3, 4, 40e6))
    )
    known = replace(going(run=Run(info=Info(window=Window(steps=900)))), steps=rows)
    assert draw_step_time(known, 80, now_wall_ns=0).plain.startswith("step     52.0 ms  mean of 5, mean of ranks")
    assert (mean_times(known)["wall"], mean_times(known)["forward"]) == (52e6, 26e6)
    head = draw_ranks(replace(known, steps=(replace(rows[0], last=35_999),)), 80, 2, cursor=0, start=0, order="work")[0]
    assert "now  of 36,000:" in head.plain
    one = replace(known, steps=rows[:1], status=Status(ranks=1))
    assert draw_step_time(one, 80, now_wall_ns=0).plain.startswith("step      100 ms  median of 1 step  ")


def test_the_bar_of_the_chosen_rank_keeps_its_colors() -> None:
    table = Ranks(
        total=1, order="work", rank=(0,), host=("a",), state=("running",), mean_ns={"wall": (4e6,), "work": (3e6,)}
    )
    line = draw_ranks(going(ranks=table), 120, 4, cursor=0, start=0, order="work")[1]
    bar = line.plain.index("█")
    assert [(span.start, span.end) for span in line.spans if span.style == "reverse"] == [(0, bar)]


def test_what_else_was_found_and_how_grave_it_is() -> None:
    others = (Finding(severity="info"), Finding(severity="warning"), Finding(severity="info"))
    found = Findings(verdict=Verdict(severity="critical", title="Slow. " * 20), findings=(Finding(), *others))
    lines = [line.plain for line in draw_verdict(going(findings=found), 60, 3)]
    assert lines[0] == "✖ Slow. Slow. Slow. Slow. Slow. Slow. Slow.     ▲ +3 more: v"
    assert lines[1] == "  Slow. Slow. Slow. Slow. Slow. Slow. Slow."
    assert "more" not in draw_verdict(going(findings=Findings(verdict=found.verdict)), 60, 3)[0].plain


def test_the_fullest_rank() -> None:
    held = {0: [300.0, 200.0], 1: [100.0, 250.0, None]}
    series = tuple(Sample(rank=rank, values={"rss": values, "rss_file": [50.0]}) for rank, values in held.items())
    known = going(processes=Samples(series=series))
    assert draw_machine(known, 80).plain == "machine rank 1 holds 250 B"
    assert draw_machine(replace(known, status=Status(over=True)), 80).plain == "machine rank 0 held 250 B"


def test_a_finished_run_has_the_figures_of_its_summary() -> None:
    """Curves begin with imports and start-up; the summary's figures are of the steady steps."""
    starting = Sample(values={"util_percent": [0.0, 0.0, 97.0], "power_w": [90.0, 90.0, 600.0], "cpu_percent": [1.0]})
    curves = {"gpus": Samples(series=(starting,)), "hosts": Samples(series=(starting,))}
    gpus = [
        GpuFigures(
            util_percent=Levels(median=percent, max=100.0), power_w=Levels(median=600.0, max=700.0),
            temperature_c=Levels(median=60.0, max=64.0), mem_used_max=used, mem_total=140.0,
        )
        for percent, used in ((97.0, 35.0), (91.0, 70.0))
    ]  # fmt: skip
    host = HostFigures(cpu_percent=Levels(median=40.0, max=90.0), mem_total=64.0, mem_available_min=40.0)
    machines = Machines(gpus=(*gpus, GpuFigures(in_use=False, util_percent=Levels(median=0.0))), nodes=(host,))
    known = replace(going(**curves), status=Status(over=True), machines=machines)
    assert draw_machine(known, 120).plain == (
        "machine 2 GPUs 94% (min 91%) · GPU memory 50% · 600 W · 64 °C · host CPU 40% · host memory 38%"
    )
    assert draw_machine(replace(known, machines=None), 80).plain == "machine no figures"
    assert draw_machine(going(**curves), 80).plain == "machine 1 GPU 97% · 600 W · host CPU 1%"


def test_the_way_out_is_always_in_sight() -> None:
    for width in range(16, 120):
        line = draw_keys(width, beside_job=False, pane="ranks").plain
        assert line.endswith("? help  q quit")
        assert cell_len(line) <= width


def test_figures_are_on_the_clock_of_the_findings() -> None:
    """The host runs ahead of a device that is timed in some steps: its times say nothing."""
    host = {"wall": 4e6, "work": 4e6, "other": 4e6}
    rows = tuple(
        StepRow(
            first=at,
            last=at,
            mean_ns=host,
            memory_bytes={},
            device_ns={"forward": 30e6, "comm": 10e6} if at % 4 == 0 else {},
        )
        for at in range(8)
    )
    known = replace(going(), steps=rows)
    assert known.status is not None
    assert draw_phases(known, 80, 4)[0].plain.startswith("host phase")
    known = replace(known, status=msgspec.structs.replace(known.status, clock="device"))
    head, forward, comm = (line.plain for line in draw_phases(known, 80, 4)[:3])
    assert head.startswith("on device")
    assert forward.split()[:3] == ["forward", "30.0", "ms"]
    assert comm.split()[:4] == ["comm", "10.0", "ms", "25%"]
    assert draw_step_time(known, 80).plain.split()[:5] == ["step", "40.0", "ms", "median", "of"]


def test_the_verdict_takes_three_lines_of_24_and_the_help_fits() -> None:
    drawn = draw_screen(going(), ViewState(pane="help"), 80, 24).lines
    assert any("rank that works longest" in line.plain or "that works longest. " in line.plain for line in drawn)
    assert max(len(draw_verdict(going(), 80, lines)) for lines in (1, 2, 3)) <= 3


def test_few_ranks_leave_their_lines_to_the_verdict() -> None:
    found = Verdict(severity="critical", title="Slow. " * 20, price="a price " * 12, advice=("do it " * 20,))
    whole = [line.plain for line in draw_verdict(going(findings=Findings(verdict=found)), 80, 6)]
    for ranks, shown in ((2, 6), (13, 4), (64, 3)):  # no phase is known here
        table = Ranks(total=ranks, order="work", rank=(0, 1), host=("a", "a"), state=("running",) * 2)
        known = going(findings=Findings(verdict=found), ranks=table, status=Status(ranks=ranks))
        lines = [line.plain for line in draw_screen(known, ViewState(), 80, 24).lines]
        assert (lines.index(next(line for line in lines if line.startswith("step "))), len(whole)) == (1 + shown, 6)


def test_the_help_is_wrapped_where_the_window_has_two_columns() -> None:
    lines = [line.plain for line in draw_screen(going(), ViewState(pane="help"), 150, 40).lines]
    right = [line.partition("│")[2] for line in lines]
    assert not any("…" in line for line in right)
    assert "a finding names." in " ".join(right)


def test_a_large_window_is_used() -> None:
    """With few ranks, findings and events fill what the table leaves empty."""
    others = tuple(Finding(severity="warning", title=f"Finding {at}.") for at in range(3))
    table = Ranks(total=2, order="work", rank=(0, 1), host=("a", "a"), state=("running",) * 2)
    found = Findings(verdict=Verdict(severity="critical", title="Slow."), findings=others)
    drawn = draw_screen(going(findings=found, ranks=table), ViewState(), 200, 50).lines
    left = [line.plain.partition("│")[0].rstrip() for line in drawn]
    assert all(any(f"Finding {at}." in line for line in left) for at in range(3))
    small = draw_screen(going(findings=found, ranks=table), ViewState(), 80, 24).lines
    assert not any("Finding 1." in line.plain for line in small)


def test_since_when_a_finding_holds() -> None:
    text = FindingText(look="warning", facts=("A slow rank", "rank 3", "steps 12–260"), price=("9% of the time", "2 s"))
    finding = Finding(severity="warning", title="Rank 3 is slow.", advice=("Screen at it.",), text=text)
    judged = Judged(text="Based on steps 12 to 260, 8 ranks.")
    found = Findings(verdict=Verdict(severity="warning", title=finding.title), findings=(finding,), judged=judged)
    verdict = [line.plain.rstrip() for line in draw_verdict(going(findings=found), 100, 6)]
    assert verdict[-1] == "  found   A slow rank · rank 3 · steps 12–260 · Based on steps 12 to 260, 8 ranks."
    pane = draw_screen(going(findings=found), ViewState(pane="findings"), 80, 24).lines
    lines = [line.plain.strip() for line in pane]
    assert "A slow rank · rank 3 · steps 12–260 · 9% of the time · 2 s" in lines
    assert "Based on steps 12 to 260, 8 ranks." in lines


def test_a_wide_terminal_fills_both_columns() -> None:
    """Short output leaves its column to the events; findings continue the other one."""
    finding = Finding(severity="warning", title="Rank 3 is slow.")
    found = Findings(verdict=Verdict(severity="warning", title=finding.title), findings=(finding,))
    events = tuple(Event(number=number, event="x", text=f"Event {number}.") for number in range(4))
    known = going(findings=found, events=events, output=Output(path="logs/rank-0.log", text=b"line\n", size=5))
    lines = [line.plain for line in draw_screen(known, ViewState(), 200, 50).lines]
    left, right = ([line.partition("│")[side] for line in lines] for side in (0, 2))
    assert any(line.startswith("▲ Rank 3 is slow.") for line in left[6:])
    assert any("events · 4 newest" in line for line in right)
    assert any("Event 3." in line for line in right)
