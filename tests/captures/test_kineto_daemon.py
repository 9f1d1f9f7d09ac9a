"""Processes captured in the place of Kineto's daemon; a small client stands in for libkineto."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.captures.kineto_daemon import CaptureLimits, ProcessCapture, capture_processes, pack_trace
from stepscope.captures.kineto_process import TracedProcess, find_processes
from stepscope.captures.kineto_protocol import LARGEST_DATAGRAM, TraceOptions, pack_message
from stepscope.captures.kineto_socket import DaemonSocket, Datagram, listen
from stepscope.errors import CaptureError

CLIENT = Path(__file__).parents[1] / "support/jobs/kineto_client.py"
REQUEST = pack_message("req", b"\3" + bytes(15))
Start = Callable[..., int]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, which fits into the address of a socket."""
    with tempfile.TemporaryDirectory(prefix="kineto-") as name:
        yield Path(name)


@pytest.fixture
def start(commands: Any, folder: Path) -> Start:
    def started(behavior: str = "", **environment: str) -> int:
        ours = {"KINETO_USE_DAEMON": "1", "KINETO_IPC_SOCKET_DIR": str(folder), **environment}
        process: subprocess.Popen[str] = commands.start_python(CLIENT, folder, behavior, env=ours)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    return started


def unpacked(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return document


# -- whole captures ---------------------------------------------------------------------------------------------------


def test_only_the_requested_processes_are_captured(start: Start, folder: Path, tmp_path: Path) -> None:
    first, second, other = start(RANK="0", WORLD_SIZE="4"), start(RANK="3", WORLD_SIZE="4"), start()
    processes = find_processes([first, second])
    output = {first: tmp_path / "a.json.gz", second: tmp_path / "b.json.gz"}
    doing: list[str] = []

    captured = capture_processes(
        processes, TraceOptions(steps=3), output, report=lambda process, text: doing.append(f"{process.rank} {text}")
    )

    assert [(capture.process.pid, capture.path, capture.problem) for capture in captured] == [
        (first, output[first], ""),
        (second, output[second], ""),
    ]
    assert unpacked(output[first])["distributedInfo"] == {"rank": 0, "world_size": 4}
    trace = unpacked(output[second])
    assert trace["distributedInfo"] == {"rank": 3, "world_size": 4}
    assert trace["traceEvents"][0]["pid"] == second
    assert trace["settings"]["ACTIVITIES_ITERATIONS"] == "3"
    assert captured[1].notice == (
        f"process {second} (rank 3) made no optimizer step yet, so 500 ms were recorded instead"
    )
    assert max(doing) == "3 waiting until it asks for work, at most 5 s"
    assert "0 recording 3 optimizer steps" in doing
    # The other one asked all the time and got nothing; our folders and the socket are gone.
    assert not Path(trace["settings"]["ACTIVITIES_LOG_FILE"]).parent.exists()
    assert not (folder / "dynolog").exists()
    assert not list(Path(tempfile.gettempdir()).glob(f"stepscope-capture-*/*_{other}.json"))


def test_several_processes_begin_at_the_same_time(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    output = {first: tmp_path / "a.json.gz", second: tmp_path / "b.json.gz"}
    capture_processes(find_processes([first, second]), TraceOptions(duration_ms=300), output)
    begun = {unpacked(path)["settings"]["PROFILE_START_TIME"] for path in output.values()}
    assert len(begun) == 1
    assert begun != {"0"}


@pytest.mark.parametrize(
    ("behavior", "options", "problem"),
    [
        ("silent", TraceOptions(), "did not ask for work within 500 ms"),
        ("busy", TraceOptions(), "is being profiled already"),
        ("mortal", TraceOptions(), "ended before its trace was written"),
    ],
)
def test_what_can_go_wrong_with_a_process(
    start: Start, folder: Path, tmp_path: Path, behavior: str, options: TraceOptions, problem: str
) -> None:
    pid = start(behavior)
    # A process that answers has all the time of the test.
    limits = CaptureLimits(ask_s=60.0 if behavior == "mortal" else 0.5)
    (captured,) = capture_processes(find_processes([pid]), options, {pid: tmp_path / "a.json.gz"}, limits=limits)
    assert captured.path is None
    assert captured.problem.startswith(f"process {pid} {problem}")
    assert list(tmp_path.glob("*.gz")) == []
    assert not (folder / "dynolog").exists()


def test_an_unwritable_output_is_a_problem_of_that_process(start: Start, tmp_path: Path) -> None:
    pid = start()
    output = tmp_path / "missing/a.json.gz"
    (captured,) = capture_processes(find_processes([pid]), TraceOptions(), {pid: output})
    assert captured.problem == f"cannot write the trace of process {pid} to {output}: No such file or directory"


# -- one process, with an injected clock ------------------------------------------------------------------------------


@pytest.fixture
def capture(tmp_path: Path) -> ProcessCapture:
    return new_capture(tmp_path, TraceOptions(steps=2))


def new_capture(folder: Path, options: TraceOptions) -> ProcessCapture:
    (folder / "trace").mkdir()
    return ProcessCapture(
        process=this_process(),
        options=options,
        folder=folder / "trace",
        log_file="/x/trace.json",
        limits=CaptureLimits(ask_s=20.0, steps_s=100.0, write_s=10.0, most_bytes=100),
        begun_s=0.0,
    )


def this_process(socket_folder: str = "") -> TracedProcess:
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return TracedProcess(
        pid=os.getpid(),
        user=os.geteuid(),
        started_ticks=started,
        root=Path("/proc/self/root"),
        socket_folder=socket_folder,
        rank=None,
        world_size=None,
    )


def answer(capture: ProcessCapture, content: bytes, now_s: float) -> bytes | None:
    datagram = Datagram(content=content, pid=os.getpid(), user=os.geteuid(), address=b"\0x\0")
    return capture.answer_to(datagram, start_wall_ms=0, delay_s=0.0, now_s=now_s)


def test_the_configuration_is_sent_once(capture: ProcessCapture) -> None:
    assert answer(capture, b"nonsense", 1.0) is None
    sent = answer(capture, REQUEST, 2.0)
    assert sent is not None
    assert b"ACTIVITIES_ITERATIONS=2\n" in sent
    assert answer(capture, REQUEST, 7.0) is None
    assert capture.state == "recording"


def test_an_answer_that_did_not_arrive_is_sent_again(capture: ProcessCapture) -> None:
    assert answer(capture, REQUEST, 2.0) is not None
    capture.withdraw(2.0)
    assert answer(capture, REQUEST, 7.0) is not None


def test_steps_that_do_not_come_are_given_up(capture: ProcessCapture) -> None:
    answer(capture, REQUEST, 2.0)
    capture.update(106.9)
    assert capture.state == "recording"
    capture.update(107.0)
    assert capture.problem == (
        f"process {os.getpid()} wrote no trace within 1 min 40 s: it made fewer than 2 optimizer steps, or its "
        f"script uses the profiler; --ms records a time instead of steps"
    )


def test_a_time_without_a_trace_is_given_up(tmp_path: Path) -> None:
    capture = new_capture(tmp_path, TraceOptions(duration_ms=500))
    answer(capture, REQUEST, 2.0)
    capture.update(21.4)
    assert capture.state == "recording"
    capture.update(21.5)
    assert "wrote no trace within 10.0 s after the recorded time" in capture.problem


def test_a_time_that_the_process_missed_is_recorded_again(tmp_path: Path) -> None:
    capture = new_capture(tmp_path, TraceOptions(duration_ms=500))
    answers = [answer(capture, REQUEST, at_s) for at_s in (2.0, 7.0, 12.0, 17.0, 22.0, 27.0, 32.0, 37.0)]
    assert [content is not None for content in answers] == [True, False, True, False, True, False, False, False]
    assert capture.retries == 2
    capture.update(41.4)
    assert capture.state == "recording"
    capture.update(41.5)
    assert capture.state == "failed"


def test_a_time_is_not_recorded_again_while_the_trace_is_written(tmp_path: Path) -> None:
    capture = new_capture(tmp_path, TraceOptions(duration_ms=500))
    answer(capture, REQUEST, 2.0)
    (capture.folder / "trace_7.json.tmp").write_bytes(b"{")
    capture.update(11.0)
    assert answer(capture, REQUEST, 12.0) is None


def test_a_file_that_grows_is_waited_for(capture: ProcessCapture) -> None:
    answer(capture, REQUEST, 2.0)
    growing = capture.folder / "trace_7.json.tmp"
    growing.write_bytes(bytes(10))
    capture.update(106.0)
    capture.update(115.9)
    assert capture.state == "recording"
    growing.rename(growing.with_suffix(""))
    capture.update(116.0)
    assert capture.state == "written"
    assert capture.trace() == capture.folder / "trace_7.json"


def test_a_trace_that_is_too_large_is_given_up(capture: ProcessCapture) -> None:
    answer(capture, REQUEST, 2.0)
    (capture.folder / "trace_7.json.tmp").write_bytes(bytes(101))
    capture.update(3.0)
    assert "has more than 100 B" in capture.problem


# -- sockets ----------------------------------------------------------------------------------------------------------


def test_an_abstract_name_has_one_daemon() -> None:
    name = f"stepscope-test-{uuid.uuid4()}"
    first = DaemonSocket(name=name)
    with pytest.raises(CaptureError, match="in use by another daemon"):
        DaemonSocket(name=name)
    first.close()
    DaemonSocket(name=name).close()


def test_a_file_has_one_daemon_and_a_dead_ones_is_replaced(folder: Path) -> None:
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    dead.bind(str(folder / "dynolog"))
    with pytest.raises(CaptureError, match="in use by another daemon"):
        DaemonSocket(str(folder))
    assert (folder / "dynolog").exists()
    dead.close()
    DaemonSocket(str(folder)).close()
    assert list(folder.iterdir()) == []


def test_a_file_that_is_no_socket_stays(folder: Path) -> None:
    (folder / "dynolog").write_text("mine")
    with pytest.raises(CaptureError, match="in use by another daemon"):
        DaemonSocket(str(folder))
    assert (folder / "dynolog").read_text() == "mine"


def test_another_daemons_socket_is_not_removed(folder: Path) -> None:
    ours = DaemonSocket(str(folder))
    (folder / "dynolog").unlink()
    with closing(DaemonSocket(str(folder))):
        ours.close()
        assert (folder / "dynolog").exists()


def test_the_kernel_says_who_sent(folder: Path) -> None:
    with listen((this_process(str(folder)), this_process(str(folder)))) as sockets:
        (ours,) = sockets
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.bind(str(folder / "client"))
            client.sendto(REQUEST, str(folder / "dynolog"))
            (datagram,) = ours.datagrams()
            assert (datagram.pid, datagram.user) == (os.getpid(), os.geteuid())
            assert datagram.content == REQUEST
            assert ours.answer(datagram, b"yes")
            assert client.recv(10) == b"yes"


def test_what_is_too_long_or_has_no_sender_is_dropped(folder: Path) -> None:
    with listen((this_process(str(folder)),)) as (ours,):
        nameless = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client, nameless:
            nameless.sendto(REQUEST, str(folder / "dynolog"))
            client.bind(str(folder / "client"))
            client.sendto(bytes(LARGEST_DATAGRAM + 1), str(folder / "dynolog"))
            assert list(ours.datagrams()) == []


def test_a_process_that_never_stops_sending_does_not_hold_the_daemon(folder: Path) -> None:
    with listen((this_process(str(folder)),)) as (ours,), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.bind(str(folder / "client"))
        client.sendto(REQUEST, str(folder / "dynolog"))
        received = 0
        for _ in ours.datagrams():
            client.sendto(REQUEST, str(folder / "dynolog"))
            received += 1
            assert received <= 64
        assert received == 64
        assert len(list(ours.datagrams())) == 1


@pytest.mark.parametrize("address", [b"", b"/", b"..", b"/etc/passwd/..", b"/nowhere"])
def test_an_answer_stays_in_the_folder(folder: Path, address: bytes) -> None:
    with listen((this_process(str(folder)),)) as (ours,):
        assert not ours.answer(Datagram(content=b"", pid=1, user=0, address=address), b"x")


def test_a_folder_that_is_missing(folder: Path) -> None:
    with (
        pytest.raises(CaptureError, match=r"expects its daemon in .*, which is missing or another folder here"),
        listen((this_process(str(folder / "missing")),)),
    ):
        pass


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_process_that_does_not_exist() -> None:
    with pytest.raises(CaptureError, match="there is no process 4194305 on this machine"):
        find_processes([4194305])


def test_a_process_without_the_variable(start: Start) -> None:
    pid = start(KINETO_USE_DAEMON="")
    with pytest.raises(CaptureError, match=f"process {pid} was started without KINETO_USE_DAEMON=1"):
        find_processes([pid])


def test_a_process_of_another_user() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    with subprocess.Popen(["sleep", "600"], user=65534, group=65534, extra_groups=[], cwd="/") as process:
        try:
            with pytest.raises(CaptureError, match=f"process {process.pid} belongs to user 65534"):
                find_processes([process.pid])
        finally:
            process.kill()


# -- packing ----------------------------------------------------------------------------------------------------------


def packed(source: bytes, rank: int | None, world_size: int | None) -> bytes:
    target = io.BytesIO()
    pack_trace(io.BytesIO(source), target, rank=rank, world_size=world_size)
    return gzip.decompress(target.getvalue())


def test_the_rank_is_added_unless_the_trace_has_one() -> None:
    added = json.loads(packed(b'\n{\n"traceEvents": []}', 2, None))
    assert added == {"distributedInfo": {"rank": 2, "world_size": 3}, "traceEvents": []}
    with_rank = b'{"distributedInfo": {"rank": 1}, "traceEvents": []}'
    assert packed(with_rank, 2, 4) == with_rank


@pytest.mark.parametrize("before", [0, (1 << 16) - 5, (1 << 16) + (1 << 20) - 5])
def test_steps_are_counted_across_blocks(before: int) -> None:
    source = io.BytesIO(b" " * before + b'"Optimizer.step#SGD" "Optimizer.step#SGD"')
    assert pack_trace(source, io.BytesIO(), rank=None, world_size=None) == 2


@given(st.binary(max_size=300), st.none() | st.integers(0, 9))
@settings(max_examples=examples(100))
def test_packing_keeps_what_it_does_not_know(source: bytes, rank: int | None) -> None:
    assert packed(source, rank, None).endswith(source.lstrip()[1:])
