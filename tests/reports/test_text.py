"""The terminal summary: whole pages against golden files, and what holds for any of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death, gpu_uuid, slow_at
from fakes.traffic import Exchange, SlowLink, Traffic

from stepscope.records.series import RankError
from stepscope.records.text import bytes_text, count_text, duration_text, ms_text, number_text, share_text, span_texts
from stepscope.reports import render_text, summarize
from stepscope.reports.summary_text import communication_lines

GIB = 1 << 30
TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 41, in <module>
    main()
  File "train.py", line 30, in main
    loss = model(batch)
ValueError: expected 3 channels, got 4
"""
LOGS = [f"logs/rank-{rank}.log" for rank in range(4)]


def ended(status: str, code: int) -> dict[str, Any]:
    return {"end": {"exit_code": code, "status": status, "wall_ns": ANCHOR_WALL_NS + 8 * 10**9}}


def machine(gpus: int) -> tuple[dict[str, Any], ...]:
    """One sample of start-up, in which nothing is done yet, and one of the steady steps."""
    starting = {"wall_ns": ANCHOR_WALL_NS - 10**9, "mono_ns": 1, "node": "node0"}
    steady = {**starting, "wall_ns": ANCHOR_WALL_NS + 2 * 10**9}
    host = {
        "kind": "host",
        "cpu_percent": 46.0,
        "cpu_count": 64,
        "mem_total": 256 * GIB,
        "mem_available": 200 * GIB,
        "net_tx_bps": 3e8,
        "disk_read_bps": 10.0,
    }
    gpu = {
        "kind": "gpu",
        "name": "NVIDIA H200",
        "mem_used": 36 * GIB,
        "mem_total": 141 * GIB,
        "temperature_c": 61,
        "power_w": 512.0,
        "throttle_reasons": [],
    }
    whose = [{"index": index, "uuid": f"GPU-{gpu_uuid(index)}"} for index in range(gpus)]
    return (
        {**starting, **host, "cpu_percent": 3.0},
        {**steady, **host},
        *({**steady, "kind": "process", "pid": 1000 + rank, "rss": (500 + rank) << 20} for rank in range(4)),
        *({**starting, **gpu, **gpu_key, "util_percent": 0, "mem_used": GIB, "power_w": 90.0} for gpu_key in whose),
        *({**steady, **gpu, **row, "util_percent": 96 + row["index"]} for row in whose),
    )


MESH = Traffic(
    mesh={"dp": 2, "tp": 2},
    exchanges=(
        Exchange(dimension="tp", count=4, mb=8.0, ms=0.8),
        Exchange(dimension="dp", op="all_gather", count=2, mb=3.0, ms=6.0, hidden_ms=4.0),
    ),
    faults=(SlowLink(ranks=(3,), times=5.0, dimension="tp"),),
)
DDP = {"ddp": {"gradient_mb": 48.0, "bucket_mb": 25.0}}
PAGES = {
    "straggler": Cluster(
        steps=61, faults=(slow_at(2, "forward", 30.0),), samples=machine(0), meta=ended("finished", 0), name="demo"
    ),
    "mesh": Cluster(steps=61, traffic=MESH, ddp_hidden_ms=9.0, meta=ended("finished", 0), facts=DDP),
    "healthy": Cluster(ranks=1, meta=ended("finished", 0)),
    "tiny": Cluster(
        ranks=1,
        phases_ms={"input": 0.3, "forward": 0.2, "backward": 0.3, "optimizer": 0.15, "other": 0.05},
        warmup_ms=3.0,
        meta=ended("finished", 0),
    ),
    "exception": Cluster(
        steps=60,
        deaths=(
            Death(rank=1, step=40, state="exception", phase="forward"),
            Death(rank=0, step=41, state="exception"),
            Death(rank=2, step=41),
        ),
        errors=(
            RankError(
                rank=1,
                pid=1001,
                type="ValueError",
                message="expected 3 channels, got 4",
                traceback=TRACEBACK,
                wall_ns=ANCHOR_WALL_NS,
                step=40,
            ),
            RankError(
                rank=0, pid=1000, type="RuntimeError", message="Connection closed by peer", wall_ns=ANCHOR_WALL_NS + 5
            ),
        ),
        meta=ended("failed", 1),
    ),
    "script": Cluster(
        ranks=1,
        steps=30,
        deaths=(Death(rank=0, step=20, state="exception", phase="forward"),),
        errors=(
            RankError(
                rank=0,
                pid=1000,
                type="ValueError",
                message="expected 3 channels, got 4",
                traceback=TRACEBACK,
                wall_ns=ANCHOR_WALL_NS,
                step=20,
            ),
        ),
        meta=ended("failed", 1),
    ),
    "other": Cluster(
        ranks=1,
        phases_ms={"input": 2.0, "forward": 10.0, "backward": 20.0, "optimizer": 5.0, "other": 63.0},
        faults=(slow_at(0, "eval", 250.0, range(30, 91, 30)),),
        meta=ended("finished", 0),
    ),
    "empty": Cluster(ranks=0, steps=0, meta=ended("finished", 0)),
    "many": Cluster(
        ranks=64,
        hosts=8,
        steps=60,
        device_timed=True,
        comm_measured=False,
        faults=(slow_at(37, "input", 9.0),),
        samples=machine(2),
        allocated_mb=20_000.0,
        peak_mb=lambda rank, steps: np.where(steps < 40, 30_000.0, 31_950.0) + rank % 2,
        reserved_mb=35_840.0,
        memory_every=4,
        name="a-very-long-run-name-that-somebody-chose-to-give-it-2026",
        meta={**ended("finished", 0), "command": ["/usr/bin/torchrun", "train.py", "--config", "c" * 200]},
    ),
    "user_phases": Cluster(
        phases_ms={"input": 20.0, "forward": 10.0, "backward": 20.0, "augment": 4.0, "a_phase_with_a_long_name": 2.0},
        faults=(slow_at(3, "augment", 9.0), slow_at(0, "checkpoint", 400.0, range(50, 51))),
        epoch_every=20,
        compile_steps=(1, 40),
        missing={0: (77,)},
        meta=ended("finished", 0),
    ),
    "two_ranks_unmeasured": Cluster(
        ranks=2, comm_measured=False, faults=(slow_at(1, "forward", 12.0),), meta=ended("finished", 0)
    ),
    "running": Cluster(ranks=2, unfinished={0: 40, 1: 41}),
}


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, golden: Callable[[Path, str], None]) -> None:
    text = render_text(summarize(PAGES[name].run(), alive=name == "running", logs=LOGS if name == "straggler" else ()))
    golden(Path(__file__).parent / "golden" / f"{name}.txt", text)


@pytest.mark.few(12)
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_page_fits_and_is_plain(name: str, width: int) -> None:
    text = render_text(summarize(PAGES[name].run()), width=width)
    assert [line for line in text.splitlines() if len(line) > width] == []
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
    assert "\x1b" not in text
    assert "nan" not in text.lower().split()


@pytest.mark.parametrize("name", PAGES)
def test_color_changes_nothing_but_color(name: str) -> None:
    summary = summarize(PAGES[name].run())
    painted = render_text(summary, color=True)
    assert "\x1b[" in painted
    plain = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", painted).splitlines()) + "\n"
    assert plain == render_text(summary)


LIBRARIES = """Traceback (most recent call last):
  File "/v/lib/python3.12/site-packages/torch/utils/data/worker.py", line 7, in fetch
    data = self.dataset[index]
KeyError: 7

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 41, in <module>
    main()
  File "/v/lib/python3.12/site-packages/accelerate/launch.py", line 3, in wrapped
    return f()
  File "/v/lib/python3.12/site-packages/stepscope/recorder/hooks/forward.py", line 88, in call
    return inner(*args)
           ^^^^^^^^^^^^
  File "/v/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl
    return forward_call(*args)
           ~~~~~~~~~~~~^^^^^^^
  File "train.py", line 12, in forward
    return self.net(x)
  File "/v/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl
    return forward_call(*args)
  File "/v/lib/python3.12/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight)
RuntimeError: shapes cannot be multiplied
"""


def test_frames_of_libraries_are_one_line_and_ours_are_hidden() -> None:
    error = RankError(
        rank=1, pid=1001, type="RuntimeError", message="shapes cannot be multiplied", traceback=LIBRARIES, step=3
    )
    summary = summarize(Cluster(ranks=2, errors=(error,)).run())
    text = render_text(summary)
    assert text.count("shapes cannot be multiplied") == 1
    assert (
        "\nTraceback of rank 1, step 3\n"
        '    File "/v/lib/python3.12/site-packages/torch/utils/data/worker.py", line 7, in fetch\n'
        "      data = self.dataset[index]\n"
        "  KeyError: 7\n"
        "\n"
        "  The above exception was the direct cause of the following exception:\n"
        "\n"
        "  Traceback (most recent call last):\n"
        '    File "train.py", line 41, in <module>\n'
        "      main()\n"
        "    … 2 frames in accelerate and torch\n"
        '    File "train.py", line 12, in forward\n'
        "      return self.net(x)\n"
        "    … 1 frame in torch\n"
        '    File "/v/lib/python3.12/site-packages/torch/nn/modules/linear.py", line 125, in forward\n'
        "      return F.linear(input, self.weight)\n"
        "\n"
    ) in text
    assert summary["errors"][0]["traceback"] == LIBRARIES


@pytest.mark.parametrize("message", ["x" * 200, "first line\nsecond line"])
def test_an_error_that_the_title_does_not_show_whole_ends_its_traceback(message: str) -> None:
    traceback = (
        f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    f()\nValueError: {message}\n'
    )
    error = RankError(rank=1, pid=1001, type="ValueError", message=message, traceback=traceback)
    text = render_text(summarize(Cluster(ranks=2, errors=(error,)).run()))
    shown = message.replace("\n", "\n  ")
    assert f'    File "train.py", line 3, in <module>\n      f()\n  ValueError: {shown}\n' in text


def test_the_title_of_a_workers_error_is_without_the_traceback_in_its_message() -> None:
    message = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "data.py", line 4, in __getitem__\n    return self.rows[index]\nKeyError: 7\n'
    )
    error = RankError(rank=1, pid=1001, type="KeyError", message=message, step=3)
    title = summarize(Cluster(ranks=2, errors=(error,)).run())["verdict"]["title"]
    assert title.startswith("Rank 1 raised KeyError: Caught KeyError in DataLoader worker process 0. KeyError: 7 (in")


def test_a_long_traceback_is_cut_in_the_middle() -> None:
    lines = [f"line {number}" for number in range(100)]
    error = RankError(rank=0, pid=1000, type="ValueError", message="", traceback="\n".join(lines))
    text = render_text(summarize(Cluster(ranks=2, errors=(error,)).run()))
    assert "  line 5\n    … 60 lines …\n  line 66\n" in text
    assert "  line 99\n" in text


def command_lines(words: list[str], *, cwd: str | None = "/ada/work", width: int = 80) -> list[str]:
    """The lines next to ``command``, without their label."""
    summary = summarize(Cluster().run())
    summary["run"].update(command=words, cwd=cwd, name="a run")
    lines = render_text(summary, width=width).splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("  command   "))
    end = next(place for place, line in enumerate(lines) if place > at and line[2:12].strip())
    return [line[12:] for line in lines[at:end]]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_command_can_be_pasted(width: int) -> None:
    words = ["/venv/bin/python", "-m", "torch.distributed.run", "--nproc-per-node", "4", "/ada/work/src/train.py"]
    words += ["--note", "it's  two words", "--glob", "data/*.pt", "--lr=3e-4", "/other/place/config.py", "--empty", ""]
    lines = command_lines(words, width=width)
    assert max(map(len, lines)) <= width - 12
    assert len(lines) > 1
    done = subprocess.run(
        ["bash", "-c", "\n".join(["python() { printf '%s\\n' \"$@\"; }", *lines])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [word.removeprefix("/ada/work/") for word in words[1:]]


@pytest.mark.parametrize("words", [["--list", *map(str, range(100, 300))], ["--text", "two\nlines", "y" * 200]])
def test_a_command_that_does_not_fit_is_cut_and_says_how_to_get_it(words: list[str]) -> None:
    lines = command_lines(["/bin/python3", "/scratch/deep/train.py", *words])
    assert lines[0].startswith(f"python3 train.py {words[0]} ")
    assert lines[-2].endswith("…")
    assert len(lines) == 4
    assert lines[-1] == "(all of it: stepscope report 'a run' --command)"


def test_a_phase_of_no_steady_step_is_left_out() -> None:
    summary = summarize(Cluster().run())
    rare = {**summary["phases"]["input"], "share": 0.0, "mean_ms": 0.0, "median_ms": 0.0, "worst_ms": 0.0}
    for steps, shown in ((2, True), (0, False)):
        summary["phases"]["checkpoint"] = {**rare, "steps": steps}
        assert ("checkpoint" in render_text(summary)) is shown


def test_many_findings_and_files_are_counted_not_listed() -> None:
    summary = summarize(Cluster().run(), logs=[f"logs/rank-{rank}.log" for rank in range(20)])
    summary["findings"] = summary["findings"][:1] * 12
    text = render_text(summary)
    assert "… and 3 more in summary.json" in text
    assert "14 more logs" in text


def test_a_frame_of_a_library_is_not_where_the_user_looks() -> None:
    traceback = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    model(x)\n'
        '  File "/src/stepscope/recorder/hooks/forward.py", line 300, in call\n    return f()\n'
        '  File "/v/site-packages/torch/nn.py", line 9, in call\n    return f()\nValueError: bad\n'
    )
    error = RankError(rank=0, pid=1000, type="ValueError", message="bad", traceback=traceback)
    text = render_text(summarize(Cluster(ranks=1, errors=(error,)).run()))
    assert "  where     train.py, line 3: model(x)\n" in text
    assert "Traceback" not in text


def test_a_traceback_is_of_the_last_attempt_or_not_there() -> None:
    first = Cluster(ranks=2, steps=30, deaths=(Death(rank=1, step=20, state="exception"),))
    second = Cluster(ranks=2, steps=60, attempt=1, meta=ended("finished", 0)).run()
    error = RankError(
        rank=1, pid=1001, type="ValueError", message="bad", traceback=TRACEBACK, wall_ns=ANCHOR_WALL_NS, step=20
    )
    run = replace(second, ranks=(*first.series(), *second.ranks), errors=(error,))
    text = render_text(summarize(run))
    assert "Traceback" not in text
    assert (
        "2 attempts; all figures are from attempt 1\n"
        "  0         2 ranks on node0, steps 0–29 in 1.38 s; rank 1 raised ValueError:\n"
        "            bad (in step 20, in backward)\n"
        "  1         2 ranks on node0, steps 0–59 in 2.55 s; ended normally\n"
    ) in text


def test_only_files_that_are_there_are_named() -> None:
    summary = summarize(Cluster().run())
    assert "summary.json" in render_text(summary)
    assert "summary.json" not in render_text(summary, saved=False)
    assert "summary.json" not in render_text(summarize(Cluster(unfinished={0: 30}).run(), alive=True))


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.0832, "83.2 µs"),
        (1.004, "1.00 ms"),
        (9.996, "10.0 ms"),
        (99.96, "100 ms"),
        (12345.6, "12.3 s"),
    ],
)
def test_ms(ms: float | None, text: str) -> None:
    assert ms_text(ms) == text


def test_other_units() -> None:
    assert [duration_text(s) for s in (0.42, 8.24, 185, 7620)] == ["420 ms", "8.24 s", "3 min 5 s", "2 h 7 min"]
    assert [bytes_text(b) for b in (None, 0, 512, 1536, 512 << 20, 1.6 * GIB)] == [
        "–", "0 B", "512 B", "1.5 KiB", "512 MiB", "1.6 GiB"
    ]  # fmt: skip
    spans = [(GIB, 1.3 * GIB), (60 * GIB, 64.25 * GIB), (GIB, 201 * GIB), (0, 0)]
    assert [" to ".join(span_texts(*span)) for span in spans] == [
        "1,024 MiB to 1,331 MiB", "60.0 GiB to 64.2 GiB", "1 GiB to 201 GiB", "0 B to 0 B"
    ]  # fmt: skip
    assert [number_text(n) for n in (0.083, 2.04, 25.46, 1260.4)] == ["0.083", "2.04", "25.5", "1,260"]
    assert [share_text(s) for s in (None, 0.0, 0.004, 0.434)] == ["–", "0%", "<1%", "43%"]
    assert [count_text(n, "rank") for n in (0, 1, 1024)] == ["0 ranks", "1 rank", "1,024 ranks"]
    assert count_text(2, "process") == "2 processes"


@pytest.mark.parametrize(
    ("description", "called"), [("default_pg", "default_pg"), ("undefined", "group 1"), ("", "group 1")]
)
def test_a_group_without_a_name_is_called_by_its_number(description: str, called: str) -> None:
    op = {"op": "all_reduce", "count": 1.0, "bytes": 4.0, "exposed_ms": 2.0, "overlapped_ms": None}
    group = {"name": "1", "kind": "world", "description": description, "arrivals": None, "ops": [op]}
    _, line = communication_lines({"groups": [group]}, 80)
    assert line.split("  ")[1] == f"{called} all_reduce"
