"""Captures in the training process: which steps, which marks, what the trace says, and when they are given up."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.recorder import guard
from stepscope.recorder.capture.captures import CaptureLimits, Captures
from stepscope.recorder.capture.labels import Labels
from stepscope.recorder.capture.profiler import TorchProfiler, danger_of_unloading
from stepscope.records.capture import CaptureOrder, CaptureReport
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.records.paths import CAPTURE_SUFFIX, CAPTURED_SUFFIX, ENV_NVTX, ENV_PROFILE, TRACE_SUFFIX
from stepscope.records.steps import FLAG_CAPTURED, FLAG_COMPILED
from stepscope.ring import announce_request
from tests.recorder.conftest import Layers, Recording, forgive_failures


class Job:
    """A loop of our own, step by step, with what its recorder leaves next to the ring."""

    def __init__(self, recording: Recording) -> None:
        torch.manual_seed(1)
        self.recording = recording
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses: list[float] = []

    def train(self, steps: int, *, inside: Callable[[int], object] = lambda step: None) -> None:
        for _ in range(steps):
            loss = self.model(torch.randn(4, 8)).square().mean()
            inside(len(self.losses))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    @property
    def ring(self) -> Path:
        ring = self.recording.recorder.ring
        assert ring is not None
        return ring.path

    @property
    def captures(self) -> Captures:
        captures = self.recording.recorder.captures
        assert isinstance(captures, Captures)
        return captures

    def order(self, **fields: Any) -> CaptureOrder:
        """Order a capture as the agent does, and have the rank look for it after its next step."""
        order = CaptureOrder(**{"id": "step-10", "ranks": (0,), "at_step": 10, "steps": 3, **fields})
        self.ring.with_suffix(CAPTURE_SUFFIX).write_text(json.dumps(encoded(order)))
        assert announce_request(self.ring)
        assert self.captures._word is not None
        self.captures.due_at = self.captures._word.due_at = 0
        self.recording.recorder.attend()
        return order

    def report(self) -> CaptureReport:
        return decoded(CaptureReport, json.loads(self.ring.with_suffix(CAPTURED_SUFFIX).read_bytes()))

    def trace(self) -> dict[str, Any]:
        trace: dict[str, Any] = json.loads(self.ring.with_suffix(TRACE_SUFFIX).read_bytes())
        return trace

    def marked(self) -> list[int]:
        steps = self.recording.steps()
        return [int(row["step"]) for row in steps if row["flags"] & FLAG_CAPTURED]


@pytest.fixture
def job(recording: Recording, nothing_is_compiled_yet: None) -> Job:
    return Job(recording)


def labels(trace: dict[str, Any], begin: str) -> list[str]:
    """Names of ranges that begin so, in order of time."""
    events = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"]) if event["name"].startswith(begin)]


# -- Orders -----------------------------------------------------------------------------------------------------------


def test_an_order_is_carried_out_at_its_steps(job: Job) -> None:
    job.train(4)
    job.order()
    job.train(2)
    assert job.report().state == "waiting"
    job.train(4)  # steps 0 … 9
    assert job.report().state == "profiling"
    assert not job.ring.with_suffix(TRACE_SUFFIX).exists()
    job.train(6)
    report = job.report()
    assert (report.state, report.problem, report.first_step, report.last_step) == ("written", "", 10, 12)
    assert report.trace_bytes == job.ring.with_suffix(TRACE_SUFFIX).stat().st_size
    assert (report.id, report.rank, report.pid) == ("step-10", 0, os.getpid())
    assert report.start_ms > 0
    assert report.stop_ms > 0
    assert report.write_ms > 0
    trace = job.trace()
    assert labels(trace, "ProfilerStep#") == ["ProfilerStep#10", "ProfilerStep#11", "ProfilerStep#12"]
    assert labels(trace, "stepscope.step ") == ["stepscope.step 10", "stepscope.step 11", "stepscope.step 12"]
    assert trace["stepscope"]["rank"] == 0
    assert trace["stepscope"]["first_step"] == 10
    assert job.marked() == [7, 8, 9, 10, 11, 12, 13]
    assert not torch._C._autograd._profiler_enabled()


def test_an_order_after_a_stage_of_short_steps(job: Job) -> None:
    """How many steps pass until the next look for requests follows from their length: long ones end that wait."""
    now_s = 0.0
    recorder = job.recording.recorder
    assert isinstance(recorder.labels, Labels)
    recorder.captures = Captures(torch, recorder.ledger, recorder.labels, {}, now_s=lambda: now_s)

    def short(_: int) -> None:
        nonlocal now_s
        now_s += 0.0002

    def long(_: int) -> None:
        nonlocal now_s
        now_s += 0.5
        time.sleep(0.02)

    recorder.attend()
    job.train(3000, inside=short)
    order = CaptureOrder(id="late", ranks=(0,), at_step=100_000, steps=3)
    job.ring.with_suffix(CAPTURE_SUFFIX).write_text(json.dumps(encoded(order)))
    assert announce_request(job.ring)
    job.train(8, inside=long)
    assert (job.report().id, job.report().state) == ("late", "waiting")


@pytest.mark.parametrize(
    ("reason", "ms", "last"), [("finding", 60, 10), ("finding", 30, 11), ("finding", 10, 12), ("request", 60, 12)]
)
def test_a_capture_that_would_take_long_to_stop_ends_early(job: Job, reason: str, ms: int, last: int) -> None:
    """A step takes 5 ms of CPU, and ``ms`` more while it is recorded; stopping takes 20 times as long."""
    spent_s = 0.0

    def work(step: int) -> None:
        nonlocal spent_s
        spent_s += 0.005 + (ms / 1e3 if step >= 10 else 0)

    job.captures.cpu_s = lambda: spent_s
    job.train(4, inside=work)
    job.order(reason=reason)
    job.train(12, inside=work)
    report = job.report()
    assert (report.state, report.first_step, report.last_step) == ("written", 10, last)
    assert labels(job.trace(), "stepscope.step ")[-1] == f"stepscope.step {last}"


def test_labels_nest_with_the_ranges_of_torch(job: Job) -> None:
    job.train(4)
    job.order(steps=2, stacks=False)
    job.train(10)
    trace = job.trace()
    assert labels(trace, "stepscope.")[:4] == [
        "stepscope.step 10",
        "stepscope.forward",
        "stepscope.backward",
        "stepscope.optimizer",
    ]
    spans = sorted(
        (event["ts"], -event["dur"], event["name"])
        for event in trace["traceEvents"]
        if event.get("cat") in ("user_annotation", "cpu_op") and event["tid"] == os.getpid()
    )
    ends: list[float] = []
    for start, length, name in spans:
        while ends and ends[-1] <= start:
            ends.pop()
        assert not ends or start - length <= ends[-1] + 1e-3, name
        ends.append(start - length)


def test_losses_are_those_of_a_bare_run(job: Job) -> None:
    job.train(4)
    job.order(memory=True, shapes=True)
    job.train(20)
    assert job.report().state == "written"
    captured = job.losses
    torch.manual_seed(1)
    job.recording.recorder.ledger.close()  # nothing is recorded from here on
    bare = Job(job.recording)
    bare.train(24)
    assert bare.losses == captured


def test_stacks_memory_and_shapes_only_if_ordered(job: Job) -> None:
    job.train(4)
    job.order(steps=1, stacks=False)
    job.train(10)
    plain = job.trace()
    assert not any(event.get("cat") == "python_function" for event in plain["traceEvents"])
    assert not any(event.get("name") == "[memory]" for event in plain["traceEvents"])
    job.ring.with_suffix(TRACE_SUFFIX).unlink()
    job.order(id="step-20", at_step=20, steps=1, memory=True, shapes=True)
    job.train(12)
    full = job.trace()
    lines = {event["name"] for event in full["traceEvents"] if event.get("cat") == "python_function"}
    assert any(
        name.startswith(f"tests/recorder/{Path(__file__).name}(") or Path(__file__).name in name for name in lines
    )
    assert any(event.get("name") == "[memory]" for event in full["traceEvents"])
    assert any("Input Dims" in event.get("args", {}) for event in full["traceEvents"])


def test_a_rank_that_is_not_profiled_only_marks_the_steps(job: Job) -> None:
    job.train(4)
    job.order(ranks=(1, 2))
    job.train(16)
    assert job.report().state == "waiting"
    assert job.marked() == [7, 8, 9, 10, 11, 12, 13]
    assert not job.ring.with_suffix(TRACE_SUFFIX).exists()


def test_a_late_order_begins_at_once(job: Job) -> None:
    job.train(30)
    job.order(warmup=1)
    job.train(10)
    report = job.report()
    assert (report.state, report.first_step, report.last_step) == ("written", 32, 34)


def test_an_order_is_read_once_and_only_if_it_is_one(job: Job) -> None:
    job.train(4)
    job.order()
    job.train(12)
    job.ring.with_suffix(TRACE_SUFFIX).unlink()
    job.ring.with_suffix(CAPTURED_SUFFIX).unlink()
    job.order()  # a request of another kind: the file is the same
    job.train(12)
    assert not job.ring.with_suffix(CAPTURED_SUFFIX).exists()
    for text in (b"", b"[]", b'{"id": 3}', b"\xff\xfe", b"{" * 2_000_000):
        job.order(id="other")
        job.ring.with_suffix(CAPTURE_SUFFIX).write_bytes(text)
        job.train(1)
        assert not job.ring.with_suffix(CAPTURED_SUFFIX).exists()
    job.ring.with_suffix(CAPTURE_SUFFIX).unlink()
    os.mkfifo(job.ring.with_suffix(CAPTURE_SUFFIX))
    assert announce_request(job.ring)
    job.train(1)


# -- Giving up --------------------------------------------------------------------------------------------------------


def gives_up(job: Job, *, steps: int = 12, **fields: Any) -> str:
    """Why a capture with such an order was given up, while training went on."""
    job.order(**{"at_step": len(job.losses) + 4, **fields})
    job.train(steps)
    report = job.report()
    assert report.state == "failed"
    assert not job.ring.with_suffix(TRACE_SUFFIX).exists()
    assert not torch._C._autograd._profiler_enabled()
    assert sys.getprofile() is None
    before = len(job.losses)
    job.train(2)
    assert job.marked()[-1] < before
    return report.problem


def test_the_profiler_of_the_script_comes_first(job: Job) -> None:
    job.train(4)
    with torch.profiler.profile() as theirs:
        assert gives_up_under(job) == "the script uses torch's profiler itself"
    assert any(event.key == "aten::linear" for event in theirs.key_averages())


def gives_up_under(job: Job) -> str:
    """Like ``gives_up``, under a profiler of the script."""
    job.order(at_step=len(job.losses) + 3)
    job.train(10)
    assert job.report().state == "failed"
    assert torch._C._autograd._profiler_enabled()
    return job.report().problem


@pytest.mark.parametrize("at_step", [5, 8])
def test_the_script_starts_its_profiler_meanwhile(job: Job, at_step: int) -> None:
    """In the warm-up of ours, and while it records."""
    job.train(4)
    job.order(at_step=7, steps=5)
    profiles: list[torch.profiler.profile] = []

    def start(step: int) -> None:
        if step == at_step:
            profiles.append(torch.profiler.profile(record_shapes=True))
            profiles[0].start()

    job.train(8, inside=start)
    assert job.report().problem == "the script started torch's profiler"
    profiles[0].stop()
    names = {event.key for event in profiles[0].key_averages()}
    assert "aten::linear" in names
    # Theirs has our labels from its start on, too.
    assert f"stepscope.step {at_step + 1}" in names
    assert not any(name.startswith("ProfilerStep#") for name in names)


def test_their_schedule_works_beside_ours(job: Job, tmp_path: Path) -> None:
    """One before, and one after a capture of ours."""
    traces: list[str] = []

    def ready(profile: torch.profiler.profile) -> None:
        traces.append(str(tmp_path / f"{len(traces)}.json"))
        profile.export_chrome_trace(traces[-1])

    def use() -> None:
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
        with torch.profiler.profile(schedule=schedule, on_trace_ready=ready) as profile:
            for _ in range(6):
                job.train(1)
                profile.step()

    use()
    job.order(at_step=10)
    job.train(10)
    assert job.report().state == "written"
    use()
    for path in traces:
        trace = json.loads(Path(path).read_bytes())
        assert labels(trace, "ProfilerStep#") == ["ProfilerStep#2", "ProfilerStep#3"]
        assert {"stepscope.forward", "stepscope.backward", "stepscope.optimizer"} <= set(labels(trace, "stepscope."))
    assert len(traces) == 2


def test_compiling_is_waited_for_and_not_captured(job: Job) -> None:
    recorder = job.recording.recorder

    def compiles(step: int) -> None:
        if step in (10, 12):
            recorder.flags |= FLAG_COMPILED

    job.train(4)
    job.order(at_step=12, steps=2)
    job.train(26, inside=compiles)
    report = job.report()
    assert (report.state, report.first_step, report.last_step) == ("written", 18, 19)


def test_what_compiles_in_its_steps_is_tried_once_more(job: Job) -> None:
    recorder = job.recording.recorder
    at: list[int] = [11]

    def compiles(step: int) -> None:
        if step in at:
            recorder.flags |= FLAG_COMPILED

    job.train(4)
    job.order(at_step=10, steps=3)
    job.train(26, inside=compiles)
    report = job.report()
    assert (report.state, report.first_step) == ("written", 17)
    job.ring.with_suffix(TRACE_SUFFIX).unlink()
    at += [42, 49]
    job.order(id="step-40", at_step=40, steps=4)
    job.train(40, inside=compiles)
    assert job.report().problem == "something was compiled in each of the two attempts"


def test_too_long_no_room_and_too_large(job: Job) -> None:
    job.train(4)
    assert gives_up(job, id="a", most_s=0.0) == "the steps took longer than 0 s"
    assert gives_up(job, id="b", most_bytes=1000).endswith("more than 0 MiB")
    job.captures.limits = CaptureLimits(least_room=1 << 60)
    assert "MiB are free in" in gives_up(job, id="c")
    job.captures.limits = CaptureLimits(event_bytes=1 << 50, plenty=1 << 50)
    assert gives_up(job, id="d").startswith("there is no room for about")


@pytest.mark.parametrize(
    ("cuda", "unloads", "dangerous"),
    [
        ("12.4", "1", True),
        ("11.8", "1", True),
        ("12.4", "0", False),
        ("12.6", "1", False),
        ("13.0", "1", False),
        (None, "1", False),
    ],
)
def test_where_unloading_cupti_is_dangerous(cuda: str | None, unloads: str, dangerous: bool) -> None:
    danger = danger_of_unloading(cuda, {"TEARDOWN_CUPTI": unloads})
    assert danger == (f"CUDA {cuda} with TEARDOWN_CUPTI=1 can end a process that uses CUDA graphs" if dangerous else "")
    assert danger_of_unloading(cuda, {}) == ""


class FailingProfiler(TorchProfiler):
    """Raises in one of its methods, after torch has done what it was to do."""

    fails_in = ""

    def prepare(self) -> None:
        super().prepare()
        self._fail("prepare")

    def start(self, about: Mapping[str, Any]) -> None:
        super().start(about)
        self._fail("start")

    def write(self, path: Path) -> None:
        super().write(path)
        self._fail("write")

    def _fail(self, where: str) -> None:
        if where == self.fails_in:
            raise RuntimeError("no")


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("prepare", "torch's profiler could not be started"),
        ("start", "torch's profiler could not be started"),
        ("write", "torch's profiler failed"),
    ],
)
def test_a_profiler_that_fails(job: Job, where: str, problem: str) -> None:
    failures = guard.failures()
    job.train(4)
    job.captures.make_profiler = type("Failing", (FailingProfiler,), {"fails_in": where})
    assert gives_up(job) == problem
    job.captures.make_profiler = TorchProfiler
    job.order(id="works", at_step=len(job.losses) + 4)
    job.train(14)
    assert job.report().state == "written"
    forgive_failures(failures)


def test_a_trace_that_nobody_collected_is_not_lost(job: Job) -> None:
    job.train(4)
    job.order()
    job.train(12)
    job.order(id="step-20", at_step=20)
    job.train(10)
    assert (job.report().id, job.report().state) == ("step-10", "written")


def test_other_ways_to_use_the_profiler_come_first(job: Job) -> None:
    """``emit_itt`` and torch's legacy profiler would raise in the script while ours is active."""
    job.train(4)
    job.order()
    job.train(6)  # in the window from here on
    with torch.autograd.profiler.emit_itt():
        job.train(1)
    assert job.report().problem == "the script started torch's profiler"
    job.train(8)
    job.order(id="again", at_step=len(job.losses) + 4, steps=3)
    job.train(5)
    with torch.autograd.profiler_legacy.profile() as theirs:
        job.train(1)
    assert job.report().id == "again"
    assert job.report().problem == "the script started torch's profiler"
    assert any("addmm" in event.name for event in theirs.function_events)


def test_a_thread_of_the_script_profiles_in_the_window(job: Job) -> None:
    """There is one session of Kineto in a process: ours ends before theirs begins."""
    entered, seen = threading.Event(), Counter[str]()

    def profiles() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            entered.set()
            torch.ones(2) + 1
        seen.update(event.name for event in profile.events())

    thread = threading.Thread(target=profiles)
    job.train(4)
    job.order(steps=100)
    job.train(8)
    thread.start()
    while not entered.is_set():
        job.train(1)
    thread.join()
    assert job.report().problem == "the script started torch's profiler"
    assert seen["aten::add"] == 1
    assert not torch._C._autograd._profiler_enabled()


def test_the_sessions_folder_goes_away_in_the_window(job: Job) -> None:
    """Recording continues, although nothing can be read or written there."""
    failures = guard.failures()
    job.train(4)
    job.order()
    job.train(5)
    job.captures.limits = CaptureLimits()
    hidden = job.ring.parent.with_name("hidden")
    job.ring.parent.rename(hidden)
    job.train(200)
    hidden.rename(job.ring.parent)
    assert len(job.recording.steps()) == 209
    forgive_failures(failures)


# -- Other processes --------------------------------------------------------------------------------------------------


def test_a_forked_child_keeps_the_profile_function_of_the_script(job: Job) -> None:
    calls: list[str] = []

    def hook(frame: Any, event: str, arg: object) -> None:
        calls.append(event)

    job.train(4)
    sys.setprofile(hook)
    try:
        job.order()
        job.train(8)
        job.recording.recorder.forget()  # as in a child
        assert sys.getprofile() is hook
    finally:
        sys.setprofile(None)
        torch._C._autograd._enable_record_function(True)
        torch._C._autograd._disable_profiler()


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        profiled = bool(sys.getprofile()) or torch._C._autograd._profiler_enabled()
        return torch.tensor([float(index) ** 2, float(sys.getprofile() is not None), float(profiled)])


def test_workers_that_are_forked_in_the_window(job: Job) -> None:
    seen: list[list[float]] = []

    def forked(_: int) -> None:
        job.recording.recorder.forget()  # what ``bootstrap`` registers

    def load(step: int) -> None:
        if step == 11:
            loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2, worker_init_fn=forked)
            seen.extend(row.tolist() for batch in loader for row in batch)

    job.train(4)
    job.order()
    job.train(14, inside=load)
    assert job.report().state == "written"
    assert [row[0] for row in seen] == [float(index**2) for index in range(8)]
    assert not any(row[1] for row in seen)  # no worker calls the profile function of the parent


def test_the_process_ends_in_the_window(job: Job) -> None:
    job.train(4)
    job.order(steps=50)
    job.train(8)
    job.captures.end()
    report = job.report()
    assert (report.state, report.first_step, report.last_step) == ("written", 10, 11)
    assert labels(job.trace(), "ProfilerStep#")[:2] == ["ProfilerStep#10", "ProfilerStep#11"]
    assert not torch._C._autograd._profiler_enabled()


def test_the_process_ends_before_a_step_was_recorded(job: Job) -> None:
    job.train(4)
    job.order(steps=50)
    job.train(5)
    job.captures.end()
    assert job.report().problem == "the process ended before its trace was written"
    assert not torch._C._autograd._profiler_enabled()


def test_torch_is_as_before_when_the_hooks_are_removed(make_recorder: Callable[..., Any]) -> None:
    from stepscope.recorder.guard import ImportWatch
    from stepscope.recorder.instrumentation import Instrumentation

    profile = torch.autograd.profiler.profile
    before = {name: vars(profile)[name] for name in ("_prepare_trace", "_start_trace", "__exit__")}
    watch = ImportWatch()
    instrumentation = Instrumentation(make_recorder(), torch, watch)
    assert vars(profile)["_start_trace"] is not before["_start_trace"]
    instrumentation.remove()
    watch.remove()
    assert {name: vars(profile)[name] for name in before} == before


# -- Schedule ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, nothing_is_compiled_yet: None) -> Job:
    monkeypatch.setenv(ENV_PROFILE, "wait=6,warmup=1,active=2,repeat=2,no-stacks")
    return Job(request.getfixturevalue("recording"))


def test_a_schedule_is_kept_to_the_step(scheduled: Job) -> None:
    scheduled.train(12)
    report = scheduled.report()
    assert (report.id, report.state, report.first_step, report.last_step) == ("step-7", "written", 7, 8)
    assert report.reason == "schedule"
    assert labels(scheduled.trace(), "ProfilerStep#") == ["ProfilerStep#7", "ProfilerStep#8"]
    assert scheduled.trace()["stepscope"]["reason"] == "schedule"
    scheduled.ring.with_suffix(TRACE_SUFFIX).unlink()
    scheduled.train(30)
    report = scheduled.report()
    assert (report.id, report.state, report.first_step, report.last_step) == ("step-16", "written", 16, 17)
    assert scheduled.marked() == [5, 6, 7, 8, 9, 14, 15, 16, 17, 18]


# -- Labels -----------------------------------------------------------------------------------------------------------


def profiled(job: Job, steps: int, *, model: torch.nn.Module | None = None) -> list[tuple[str, float, float]]:
    """Train under a profiler of the script; name, begin and end of our labels, by begin."""
    job.model = job.model if model is None else model
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        job.train(steps)
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.name.startswith("stepscope.")
    ]
    return sorted(found, key=lambda label: (label[1], -label[2]))


@pytest.fixture
def sampled_job(layers: Layers) -> Job:
    """Its layers are sampled in every step."""
    return Job(layers.recording)


def test_sampled_layers_are_labeled_in_forward(sampled_job: Job) -> None:
    sampled_job.train(3)
    found = profiled(sampled_job, 2)
    last = [name for name, *_ in found if name.startswith("stepscope.step ")][-1]
    mark = next(label for label in found if label[0] == last)
    inside = [label for label in found if mark[1] <= label[1]]
    names = [name for name, *_ in inside]
    layer = "stepscope.layer "
    assert names[:6] == [
        *(last, "stepscope.forward", f"{layer}Sequential", f"{layer}0", f"{layer}1", f"{layer}2"),
    ]
    assert [name for name in names[6:] if name.startswith(layer)] == [], "none in backward"
    forward, model, *parts = inside[1:6]
    for inner, outer in ((model, forward), *((part, model) for part in parts)):
        assert outer[1] <= inner[1] <= inner[2] <= outer[2]


def test_layers_that_are_not_sampled_have_no_label(job: Job) -> None:
    job.train(2)
    assert not any(name.startswith("stepscope.layer ") for name, *_ in profiled(job, 2))


class Failing(torch.nn.Module):
    """Its second part fails; the model catches that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 1)
        self.bad = torch.nn.Bilinear(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        try:
            y = self.bad(x, x)
        except RuntimeError:
            pass
        return y + self.first(x)


def test_a_layer_that_fails_leaves_no_label_open(sampled_job: Job) -> None:
    model = Failing()
    sampled_job.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampled_job.model = model
    sampled_job.train(3)
    found = profiled(sampled_job, 2)
    (forward,) = [label for label in found if label[0] == "stepscope.forward"][-1:]
    inside = [label for label in found if forward[1] <= label[1] <= forward[2] and label is not forward]
    assert [name.removeprefix("stepscope.layer ") for name, *_ in inside] == ["Failing", "first", "bad", "first"]
    assert all(end <= forward[2] for *_, end in inside)


def test_a_mode_of_the_script_does_not_see_labels(sampled_job: Job) -> None:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"{func} {args[0]}" if args and isinstance(args[0], str) else str(func))
            return func(*args, **(kwargs or {}))

    sampled_job.train(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, Mode():
        sampled_job.train(2)
    assert any(event.name == "stepscope.layer 0" for event in profile.events())
    assert any("addmm" in name for name in seen)
    assert any("Optimizer.step#SGD.step" in name for name in seen), "torch's own label"
    assert not any("stepscope." in name for name in seen)


def test_ranges_of_the_script_keep_what_is_in_them(job: Job) -> None:
    """A range around the body of the loop begins before our step and ends before it: only a mark may be in there."""
    job.train(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            with torch.profiler.record_function("iteration"):
                job.train(1)
    iterations = [event for event in profile.events() if event.name == "iteration"]
    for iteration in iterations:
        inside = {child.name for child in iteration.cpu_children}
        assert {"stepscope.forward", "stepscope.backward"} <= inside
    steps = [event for event in profile.events() if event.name.startswith("stepscope.step ")]
    assert [event.name for event in steps] == ["stepscope.step 2", "stepscope.step 3", "stepscope.step 4"]
    assert not any(event.cpu_children for event in steps)


def test_a_traced_graph_has_no_labels(nvtx_job: Job) -> None:
    """``torch.jit.trace`` records every operator, also the one that begins a label."""
    nvtx_job.train(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        nvtx_job.train(1)
        traced: Any = torch.jit.trace(nvtx_job.model, torch.randn(4, 8))
    assert "profiler" not in str(traced.inlined_graph)
    assert str(traced.inlined_graph).count("aten::linear") == 2


def test_nvtx_ranges_for_nsight(sampled_job: Job) -> None:
    """``run --nvtx``: every range that begins ends, also without torch's profiler."""
    ranges: list[tuple[int, str]] = []
    ended: list[int] = []

    def start(name: str) -> int:
        ranges.append((len(ranges), name))
        return len(ranges) - 1

    labels = sampled_job.recording.recorder.labels
    assert isinstance(labels, Labels)
    sampled_job.train(1)
    labels.use_nvtx(SimpleNamespace(range_start=start, range_end=ended.append))
    sampled_job.train(4)
    names = [name for _, name in ranges]
    begin = names.index("stepscope.step 3")
    assert names[begin : names.index("stepscope.step 4")] == [
        *("stepscope.step 3", "stepscope.forward", "stepscope.layer Sequential"),
        *("stepscope.layer 0", "stepscope.layer 1", "stepscope.layer 2"),
        *("stepscope.backward", "stepscope.layer 2 backward", "stepscope.layer 1 backward"),
        *("stepscope.layer 0 backward", "stepscope.optimizer"),
    ]
    assert set(range(begin + 11)) <= set(ended)
    assert len(ended) == len(set(ended))

    exits: list[int] = []

    class Forks(torch.autograd.Function):
        """In backward, where a range is open; the child may not end it."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            before = len(ended)
            child = os.fork()
            if child == 0:
                sampled_job.recording.recorder.forget()
                os._exit(len(ended) - before)
            exits.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return gradients[0]

    sampled_job.model(Forks.apply(torch.randn(4, 8, requires_grad=True))).sum().backward()
    assert exits == [0]


def test_nvtx_ranges_of_backward_follow_each_other_and_end_where_backward_fails(sampled_job: Job) -> None:
    """They cross autograd's own ranges, which are on the same thread; each ends before the next one begins."""
    done: list[str] = []

    def start(name: str) -> str:
        if name.endswith(" backward"):
            done.append(name)
        return name

    def end(name: str) -> None:
        if name.endswith(" backward"):
            done.append(f"end of {name}")

    labels = sampled_job.recording.recorder.labels
    assert isinstance(labels, Labels)
    sampled_job.train(1)
    labels.use_nvtx(SimpleNamespace(range_start=start, range_end=end))
    sampled_job.train(3)
    layers = [f"stepscope.layer {name} backward" for name in (2, 1, 0)]
    once = [text for layer in layers for text in (layer, f"end of {layer}")]
    assert done == 2 * once

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise ValueError("in backward")

    done.clear()
    with pytest.raises(ValueError, match="in backward"):
        sampled_job.model(Fails.apply(torch.randn(4, 8, requires_grad=True))).sum().backward()
    assert done == once[:5]
    sampled_job.train(1)
    assert done == [*once, *once]


def test_nvtx_without_cuda_leaves_the_labels_of_profilers(nvtx_job: Job) -> None:
    """torch's build for CPUs has no NVTX ranges; where it has, they are there as well."""
    nvtx_job.train(2)
    names = [name for name, *_ in profiled(nvtx_job, 2)]
    assert {"stepscope.step 3", "stepscope.forward", "stepscope.backward", "stepscope.optimizer"} <= set(names)
    assert len(nvtx_job.recording.steps()) == 4


@pytest.fixture
def nvtx_job(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Job:
    monkeypatch.setenv(ENV_NVTX, "1")
    return Job(request.getfixturevalue("recording"))
