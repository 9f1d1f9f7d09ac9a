"""Alerts while the hub or the sender is killed at random: does every message arrive, in order, and how often?

    python bench/alert_kills.py hub --kills 20
    python bench/alert_kills.py run --kills 4 --repeat 5
    python bench/alert_kills.py sender --kills 100

``hub``: a process with the hub's alert engine watches a fault that begins and ends; it is killed with SIGKILL during
the incident, and started again as the launcher does.  Each receiver must get one trigger and one resolve.  ``run``: the
same with the hub of a real job that hangs for a while; a launcher starts at most five hubs a minute.  ``sender``:
the sender's process is killed while it delivers to one receiver of each type, which answer late now and then.  No
message may be lost or come before an earlier one.  One that was under way at a kill may come twice: counted here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from stepscope.alerts.model import Incident, Message, MessageStatus
from stepscope.alerts.outbox import append_messages, read_deliveries
from stepscope.alerts.receivers import TYPES
from stepscope.alerts.settings import AlertSettings, Receiver, ReceiverType, Rule, Secret, settings_variables
from stepscope.records.paths import helper_command, helper_environment

FAULT = "fault"
"""The name of a file in the run directory: while it exists, rank 2 is slow."""
RUN_ID = "killed"
SPEED = 60
"""The hub's clock runs so much faster: an incident of minutes takes seconds."""
PATHS = {"slack_bot": "/chat.postMessage", "pagerduty": "/v2/enqueue", "alertmanager": "/api/v2/alerts"}
"""Where messages are posted, by type of receiver."""


# -- receivers on loopback --------------------------------------------------------------------------------------------


class SlowReceiver:
    """Records the path and body of each request; answers some of them late, so that a kill may come in between."""

    def __init__(self, rng: random.Random, *, latest_s: float) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        """Path, ``X-Stepscope-Id``, body, in the order in which they came."""
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with receiver._lock:
                    receiver.requests.append((self.path, self.headers.get("X-Stepscope-Id") or "", body))
                    pause_s = rng.random() * latest_s
                    answer = receiver._answer(self.path)
                time.sleep(pause_s)
                try:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)
                except OSError:
                    pass  # it was killed while it waited

            do_GET = do_POST = _serve  # noqa: N815 - names of the base class

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, path: str) -> bytes:
        """As Slack's: a search finds what was posted.  Other receivers' answers are not read."""
        posted = []
        if "/conversations." in path:
            bodies = [json.loads(body) for earlier, _, body in self.requests if earlier.endswith("/chat.postMessage")]
            posted = [{"ts": "1.5", "metadata": body["metadata"]} for body in bodies]
        return json.dumps({"ok": True, "channel": "C1", "ts": "1.5", "messages": posted}).encode()

    def wait_for(self, text: bytes, timeout_s: float = 120.0) -> None:
        """Wait until a request contains the text, or so long."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s and not any(text in body for _, _, body in self.requests):
            time.sleep(0.02)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def slow_receiver(rng: random.Random, latest_s: float) -> Iterator[SlowReceiver]:
    receiver = SlowReceiver(rng, latest_s=latest_s)
    try:
        yield receiver
    finally:
        receiver.close()


# -- processes --------------------------------------------------------------------------------------------------------


def start_sender(run_dir: Path, settings: AlertSettings) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        helper_command("stepscope.alerts.sender", "--run-dir", str(run_dir)),
        env={**helper_environment(os.environ), **settings_variables(settings, secrets=True)},
        stdin=subprocess.PIPE,
    )


def finish_sender(process: subprocess.Popen[bytes]) -> None:
    process.communicate(b'{"end": {}}\n', timeout=120)
    assert process.returncode == 0, process.returncode


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# -- the sender is killed ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class SenderResult:
    kills: int
    messages: int
    """To each receiver."""
    lost: dict[str, int] = field(default_factory=dict)
    out_of_order: dict[str, int] = field(default_factory=dict)
    twice: dict[str, int] = field(default_factory=dict)
    """By type of receiver: messages that came more than once."""
    unsettled: int = 0


def receiver_of(kind: ReceiverType, url: str, folder: Path) -> Receiver:
    """A receiver of each type that ends at one address, or in a file."""
    options: dict[str, Any] = {"api": f"{url}/{kind}"} if kind in ("slack_bot", "pagerduty") else {}
    if kind == "slack_bot":
        options["channel"] = "C1"
    if kind == "command":
        options["command"] = ["sh", "-c", f"cat >> {folder / 'command'}"]
    secrets = {"slack_bot": "token", "pagerduty": "routing_key", "command": ""}
    secret = secrets.get(kind, "url")
    value = f"{url}/{kind}" if secret == "url" else "secret"
    given = {secret: Secret("value", value)} if secret else {}
    return Receiver(name=kind, type=kind, options=options, secrets=given)


def numbered_message(number: int, kind: str) -> Message:
    """Messages 1, 2, 3 … begin, change and end incidents 1, 2, 3 …; the title tells them apart."""
    incident, change = (number - 1) // 3 + 1, (number - 1) % 3
    statuses: tuple[MessageStatus, ...] = ("firing", "updated", "resolved")
    now_ns = time.time_ns()
    about = Incident(
        number=incident,
        topic="speed",
        state="resolved" if change == 2 else "open",
        kind="persistent_straggler",
        severity="warning",
        title=f"message {number:05}.",
        opened_wall_ns=now_ns,
        resolved_wall_ns=now_ns if change == 2 else None,
    )
    return Message(
        id=f"{RUN_ID}/{incident}/{change + 1}/{kind}",
        receiver=kind,
        status=statuses[change],
        run=RUN_ID,
        dedup_key=f"{RUN_ID}/{incident}",
        created_wall_ns=now_ns,
        incident=about,
    )


def kill_senders(run_dir: Path, *, kills: int, seed: int, kinds: Sequence[ReceiverType] = TYPES[:-1]) -> SenderResult:
    """Deliver messages to a receiver of each type while the sender is killed so often, then let it finish."""
    rng = random.Random(seed)
    messages = 0
    with slow_receiver(random.Random(seed + 1), 0.05) as receiver:
        receivers = [receiver_of(kind, receiver.url, run_dir) for kind in kinds]
        settings = AlertSettings(receivers={each.name: each for each in receivers})
        for _ in range(kills):
            sender = start_sender(run_dir, settings)
            # It takes about 0.3 s until it sends: some kills come before, some between two messages, some in one.
            time.sleep(0.1 + 0.4 * rng.random())
            for _ in range(3):
                messages += 1
                append_messages(run_dir, [numbered_message(messages, kind) for kind in kinds])
                time.sleep(0.3 * rng.random())
            kill(sender)
        finish_sender(start_sender(run_dir, settings))
        result = SenderResult(kills=kills, messages=messages)
        for kind in kinds:
            arrived = _numbers(kind, receiver, run_dir)
            counts = Counter(arrived)
            result.lost[kind] = sum(1 for number in range(1, messages + 1) if not counts[number])
            result.twice[kind] = sum(1 for count in counts.values() if count > 1)
            first = list(dict.fromkeys(arrived))
            result.out_of_order[kind] = sum(1 for a, b in itertools.pairwise(first) if b < a)
        result.unsettled = sum(1 for _, delivery in read_deliveries(run_dir) if delivery.state != "sent")
    return result


def _numbers(kind: str, receiver: SlowReceiver, run_dir: Path) -> list[int]:
    """The numbers of the messages in the order in which a receiver got them; of a Slack bot, what it posted."""
    if kind == "command":
        texts = (run_dir / "command").read_bytes().splitlines()
    else:
        path = f"/{kind}{PATHS.get(kind, '')}"
        texts = [body for where, _, body in receiver.requests if where == path]
    return [int(text.partition(b"message ")[2][:5]) for text in texts if b"message " in text]


# -- the hub is killed ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class HubResult:
    kills: int
    statuses: list[str]
    """Of the messages that arrived, in order."""
    ids: int
    """How many different messages arrived."""


def hub_settings(url: str) -> AlertSettings:
    """One webhook; all times as users have them."""
    hook = Receiver(name="hook", type="webhook", secrets={"url": Secret("value", f"{url}/webhook")})
    rule = Rule(name="critical", on="findings", severity="critical", receivers=("hook",))
    return AlertSettings(rules=(rule,), receivers={"hook": hook})


def run_hub(run_dir: Path) -> None:
    """What the run's hub does for alerts: watch, and call the engine."""
    from stepscope.alerts.engine import AlertEngine, IncidentFiles, RunName
    from stepscope.alerts.observation import Observation
    from stepscope.alerts.settings import settings_from
    from stepscope.records.finding import Finding
    from stepscope.records.finding_history import FindingEpisode

    finding = Finding(kind="persistent_straggler", severity="critical", title="Rank 2 is slow.", ranks=(2,))
    engine = AlertEngine(IncidentFiles(run_dir), settings_from(os.environ), run=RunName(id=RUN_ID, name=RUN_ID))
    began_ns = int((run_dir / "began").read_text())
    print("ready", flush=True)
    while True:
        now_ns = began_ns + SPEED * (time.time_ns() - began_ns)
        step = (now_ns - began_ns) // 100_000_000
        episode = FindingEpisode(
            number=1,
            change="opened",
            finding=finding.to_dict(),
            attempt=0,
            first_step=step,
            first_wall_ns=now_ns,
            step=step,
            wall_ns=now_ns,
        )
        engine.observe(
            Observation(
                wall_ns=now_ns,
                step=step,
                ranks=4,
                world_size=4,
                findings=(episode,) if (run_dir / FAULT).exists() else (),
                last_step_wall_ns=now_ns,
                first_step_wall_ns=began_ns,
            )
        )
        time.sleep(0.02)


def kill_hubs(run_dir: Path, *, kills: int, seed: int) -> HubResult:
    """Kill the hub so often during one incident; half of them after the fault is gone."""
    rng = random.Random(seed)
    (run_dir / "began").write_text(str(time.time_ns()))
    with slow_receiver(random.Random(seed + 1), 0.02) as receiver:
        settings = hub_settings(receiver.url)
        environment = {**os.environ, **settings_variables(settings, secrets=False)}
        words = [sys.executable, str(Path(__file__).resolve()), "process", "--run-dir", str(run_dir)]
        sender = start_sender(run_dir, settings)
        try:
            (run_dir / FAULT).touch()
            for number in range(kills):
                if number == kills // 2:
                    (run_dir / FAULT).unlink()
                hub = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)
                assert hub.stdout is not None
                hub.stdout.readline()
                # The times of all that it writes are in this range: the first message, the last, and nothing between.
                time.sleep(0.6 * rng.random())
                kill(hub)
            hub = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)
            receiver.wait_for(b'"status":"resolved"')
            time.sleep(0.5)  # half a minute for the hub: nothing else may come
            kill(hub)
        finally:
            finish_sender(sender)
        bodies = [json.loads(body) for _, _, body in receiver.requests]
    return HubResult(
        kills=kills, statuses=[body["status"] for body in bodies], ids=len({body["id"] for body in bodies})
    )


# -- the hub of a real job is killed ----------------------------------------------------------------------------------

JOB = """
import pathlib, sys, time, stepscope
folder = pathlib.Path(sys.argv[1])
while not (folder / "stop").exists():
    with stepscope.step():
        time.sleep(0.02)
    while (folder / "fault").exists():
        time.sleep(0.02)
"""


def kill_hubs_of_run(folder: Path, *, kills: int, seed: int) -> HubResult:
    """Record a job that hangs while there is a fault; its hub is killed so often, half of them after the hang."""
    rng = random.Random(seed)
    (folder / "job.py").write_text(JOB)
    with slow_receiver(random.Random(seed + 1), 0.02) as receiver:
        words = [sys.executable, "-m", "stepscope", "run", "--dir", str(folder / "runs"), "--alert", receiver.url]
        words += ["--alert", "no_step>5", "--", sys.executable, str(folder / "job.py"), str(folder)]
        with (folder / "printed").open("wb") as printed:
            launcher = subprocess.Popen(words, cwd=folder, stdout=printed, stderr=printed)
        try:
            time.sleep(5.0)
            (folder / FAULT).touch()
            killed = 0
            for number in range(kills):
                if number == kills // 2:
                    receiver.wait_for(b'"status":"firing"')
                    (folder / FAULT).unlink()
                time.sleep(1.0 + 7.0 * rng.random())
                killed += _kill_hub(launcher.pid)
            receiver.wait_for(b'"status":"resolved"')
            (folder / "stop").touch()
            launcher.wait(timeout=120)
        finally:
            launcher.kill()
            launcher.wait()
        bodies = [json.loads(body) for _, _, body in receiver.requests]
    return HubResult(
        kills=killed, statuses=[body["status"] for body in bodies], ids=len({body["id"] for body in bodies})
    )


def _kill_hub(launcher: int) -> int:
    """Kill the hub of a launcher, as soon as there is one."""
    for _ in range(1000):
        for child in psutil.Process(launcher).children():
            with suppress(psutil.Error):
                if "stepscope.hub" in child.cmdline():
                    child.kill()
                    return 1
        time.sleep(0.02)
    return 0


# -- command line -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("hub", "run", "sender", "process"))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repeat", type=int, default=1, help="hub, run: so many incidents, one after the other")
    options = parser.parse_args()
    if options.what == "process":
        run_hub(options.run_dir)
    if options.what in ("hub", "run"):
        outcomes: Counter[str] = Counter()
        kill_all = kill_hubs if options.what == "hub" else kill_hubs_of_run
        for number in range(options.repeat):
            with tempfile.TemporaryDirectory() as folder:
                outcome = kill_all(Path(folder), kills=options.kills, seed=options.seed + number)
            outcomes[" ".join(outcome.statuses)] += 1
        print(f"{options.repeat} incidents, {options.kills} kills of the hub in each; messages that arrived:")
        for statuses, count in outcomes.most_common():
            print(f"{count:>5} × {statuses}")
        return
    with tempfile.TemporaryDirectory() as folder:
        result = kill_senders(Path(folder), kills=options.kills, seed=options.seed)
        print(f"{result.kills} kills, {result.messages} messages to each receiver, {result.unsettled} not delivered")
        print(f"{'receiver':<14}{'lost':>6}{'out of order':>14}{'twice':>7}")
        for kind, lost in result.lost.items():
            print(f"{kind:<14}{lost:>6}{result.out_of_order[kind]:>14}{result.twice[kind]:>7}")


if __name__ == "__main__":
    main()
