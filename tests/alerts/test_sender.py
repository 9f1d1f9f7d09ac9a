"""The sender's process: what it delivers to real sockets, how small it stays, what it survives and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from alert_messages import lifecycle, message
from loopback_receiver import LoopbackReceiver, Reply, closed_port, loopback_receiver
from waiting import until

from stepscope.alerts.model import Message
from stepscope.alerts.outbox import append_messages, read_deliveries
from stepscope.alerts.settings import AlertSettings, Receiver, Secret, settings_variables
from stepscope.records.paths import helper_command, helper_environment
from stepscope.store.paths import ALERTS

LARGE_MODULES = {"ssl", "http", "email", "asyncio", "subprocess", "numpy", "duckdb", "psutil", "tomllib", "logging"}
"""What the sender loads with the first request, or never: each is half a megabyte or more."""


def hook(name: str, url: str, **more: object) -> Receiver:
    return Receiver(name=name, type="webhook", secrets={"url": Secret("value", url)}, **more)  # type: ignore[arg-type]


class Senders:
    """Starts senders of one run, and ends those that a test left."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *receivers: Receiver, linger_s: float = 30.0, **environment: str) -> subprocess.Popen[bytes]:
        settings = AlertSettings(receivers={receiver.name: receiver for receiver in receivers})
        variables = {**settings_variables(settings, secrets=True), **environment}
        words = ["stepscope.alerts.sender", "--run-dir", str(self.run_dir), "--linger", str(linger_s)]
        process = subprocess.Popen(
            helper_command(*words),
            env={**helper_environment(os.environ), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._started.append(process)
        return process

    @staticmethod
    def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
        """Report the end of the run, as the launcher does; return exit code and what it printed."""
        out, err = process.communicate(b'{"end": {}}\n', timeout=60)
        return process.returncode, out + err

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def senders(tmp_path: Path) -> Iterator[Senders]:
    run_dir = tmp_path / "runs" / "run-1"
    run_dir.mkdir(parents=True, mode=0o700)
    made = Senders(run_dir)
    yield made
    made.close()


def states(run_dir: Path, name: str = "hook") -> list[str]:
    return [delivery.state for sent, delivery in read_deliveries(run_dir) if sent.receiver == name]


def recent_lifecycle() -> list[Message]:
    return [replace(each, created_wall_ns=time.time_ns()) for each in lifecycle()]


def ids_of(receiver: LoopbackReceiver) -> list[str]:
    return [request.headers["X-Stepscope-Id"] for request in receiver.accepted]


def test_delivers_in_order_whatever_goes_wrong_first(senders: Senders, receiver: LoopbackReceiver) -> None:
    """One receiver never answers, one is down: neither delays the one whose network is bad for a while."""
    receiver.replies = [
        Reply(status=429, headers={"Retry-After": "1"}),
        Reply(raw=b"HTTP/1.1 20"),
    ]
    with loopback_receiver() as mute:
        mute.otherwise = lambda _: Reply(never=True)
        dead = f"http://127.0.0.1:{closed_port()}/"
        process = senders.start(
            hook("hook", f"{receiver.url}/hook"), hook("mute", mute.url, timeout_seconds=1.0), hook("dead", dead)
        )
        until(lambda: psutil.Process(process.pid).num_threads() == 5)  # its own, three receivers, leftovers
        messages = lifecycle()
        others = [
            replace(each, receiver=name, id=f"{each.id}-{name}") for name in ("mute", "dead") for each in messages
        ]
        append_messages(senders.run_dir, [*others, *messages])
        receiver.wait_for(lambda: len(receiver.accepted) == 3)
        until(lambda: states(senders.run_dir) == ["sent"] * 3)
        until(lambda: {*states(senders.run_dir, "mute"), *states(senders.run_dir, "dead")} == {"failed", "waiting"})
        why = {sent.receiver: delivery.why for sent, delivery in read_deliveries(senders.run_dir) if delivery.why}
    assert ids_of(receiver) == [each.id for each in messages]
    assert why == {"mute": "no answer within 1 s", "dead": "connection refused"}
    assert receiver.url not in " ".join(psutil.Process(process.pid).cmdline())
    assert receiver.url.encode() not in b"".join(path.read_bytes() for path in (senders.run_dir / ALERTS).iterdir())
    process.terminate()
    assert process.communicate(timeout=60) == (b"", b"")


def test_loads_little_before_there_is_something_to_send() -> None:
    """Its memory also depends on whether Python finds compiled modules: without, it is 4 MB more."""
    code = "import sys, stepscope.alerts.sender; print(*{name.partition('.')[0] for name in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "stepscope" in found
    assert not LARGE_MODULES & set(found)


def test_ends_when_everything_is_delivered(senders: Senders, receiver: LoopbackReceiver) -> None:
    process = senders.start(hook("hook", receiver.url))
    append_messages(senders.run_dir, lifecycle())
    assert senders.finish(process) == (0, b"")
    assert ids_of(receiver) == [each.id for each in lifecycle()]


def test_stays_for_a_while_after_the_run_and_leaves_the_rest(senders: Senders, receiver: LoopbackReceiver) -> None:
    append_messages(senders.run_dir, lifecycle())
    process = senders.start(hook("hook", f"http://127.0.0.1:{closed_port()}/"), linger_s=0.5)
    assert senders.finish(process) == (0, b"")
    assert states(senders.run_dir) == ["failed", "waiting", "waiting"]
    senders.finish(senders.start(hook("hook", receiver.url)))
    assert ids_of(receiver) == [each.id for each in lifecycle()]


def test_two_senders_of_a_run_do_not_send_twice(senders: Senders, receiver: LoopbackReceiver) -> None:
    first, second = senders.start(hook("hook", receiver.url)), senders.start(hook("hook", receiver.url))
    append_messages(senders.run_dir, lifecycle())
    receiver.wait_for(lambda: len(receiver.accepted) == 3)
    codes = [senders.finish(process)[0] for process in (first, second)]
    assert codes == [0, 0]
    assert ids_of(receiver) == [each.id for each in lifecycle()]


def test_a_missing_secret_is_reported_without_anything_else(senders: Senders) -> None:
    hidden = Receiver(name="hook", type="webhook", secrets={"url": Secret("env", "NO_SUCH_VARIABLE")})
    append_messages(senders.run_dir, lifecycle())
    code, printed = senders.finish(senders.start(hidden, linger_s=0.5))
    assert code == 0
    text = "alerts to hook are not sent: the environment variable NO_SUCH_VARIABLE is not set"
    assert text in printed.decode()
    assert states(senders.run_dir) == ["failed", "waiting", "waiting"]


def test_flush_sends_what_jobs_left(
    senders: Senders, receiver: LoopbackReceiver, run_stepscope: Callable[..., Any]
) -> None:
    append_messages(senders.run_dir, [replace(each, receiver="webhook") for each in recent_lifecycle()])
    done = run_stepscope("alerts", "flush", str(senders.run_dir.parent), env={"STEPSCOPE_ALERT": receiver.url})
    assert (done.code, done.stdout) == (0, "sent 3 messages, gave up 0\n"), done.stderr
    assert [request.json["status"] for request in receiver.accepted] == ["firing", "updated", "resolved"]
    receiver.otherwise = lambda _: Reply(status=503)
    append_messages(
        senders.run_dir, [replace(message(1, receiver="webhook", number=2), created_wall_ns=time.time_ns())]
    )
    done = run_stepscope("alerts", "flush", str(senders.run_dir.parent), env={"STEPSCOPE_ALERT": receiver.url})
    text = "sent 0 messages, gave up 0; some could not be sent (see `stepscope alerts list RUN`)\n"
    assert (done.code, done.stdout) == (1, text), done.stderr
    own = senders.start(hook("webhook", receiver.url))
    until(lambda: psutil.Process(own.pid).num_threads() == 3)
    done = run_stepscope("alerts", "flush", str(senders.run_dir.parent), env={"STEPSCOPE_ALERT": receiver.url})
    assert done.stdout == "sent 0 messages, gave up 0; left 1 run to their own senders, which still run\n"
    own.terminate()


def test_a_job_does_not_wait_for_its_receivers(commands: Any, toy: Path, receiver: LoopbackReceiver) -> None:
    """One receiver is down until the run is over, one never answers: the job ends, and the sender delivers then."""
    receiver.otherwise = lambda _: Reply(status=503)
    with loopback_receiver() as mute:
        mute.otherwise = lambda _: Reply(never=True)
        words = ("run", "--quiet", "--alert", receiver.url, "--alert", mute.url, "--alert", "run_finished")
        job = commands.start(*words, toy, "--steps", "5")
        done = commands.finish(job)  # its output is closed, although the sender is still there
        assert done.code == 0, done.stderr
        (sender,) = commands.running("stepscope.alerts.sender")
        receiver.wait_for(lambda: len(receiver.requests) > 0)
        receiver.otherwise = lambda _: Reply()
        receiver.wait_for(lambda: len(receiver.accepted) == 1)
        assert receiver.accepted[0].json["kind"] == "run_finished"
        sender.kill()
        until(lambda: not sender.is_running())
