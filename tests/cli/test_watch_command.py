"""``stepscope watch`` without a screen: which run, which hub, what is said, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.cluster import Cluster, slow_at

from stepscope.cli.commands.watch import LocalRun
from stepscope.cli.main import run_command
from stepscope.errors import HubError, HubMissing, HubRefused, NotARun, UsageError
from stepscope.store.catalog import newest_run
from stepscope.store.documents import HubFile, remove_hub_file, write_hub_file
from tests.hub.run_parts import Feed, ServedFolder, record

SLOW = Cluster(ranks=4, steps=60, faults=(slow_at(2, "forward", 40.0),), noise=0.0)
SAID = [
    "slow: finished, 4 ranks",
    "✖ Rank 2 is 40.0 ms slower than its peers in forward every step; all other ranks wait for it.",
    "slow: finished",
]


def matches(text: str) -> bool:
    """Whether that is what is said of it; who works longest may be known a moment too late, or the finding after it."""
    found = [re.fullmatch(r"\d\d:\d\d:\d\d  step 59      (.*)", line) for line in text.splitlines()]
    words = [one[1] for one in found if one is not None]
    times = [word for word in words if word.startswith("79.0 ms a step")]
    return len(words) == len(found) and len(times) == 1 and [word for word in words if word not in times] == SAID


def test_a_run_that_is_over_through_a_pipe(commands: Any, tmp_path: Path) -> None:
    record(tmp_path / "runs", "slow", SLOW.run(), sealed=False)
    done = commands.finish(commands.start("watch"))
    assert (done.code, matches(done.stdout)) == (0, True), done
    assert done.stderr == "stepscope: using runs/slow, the newest run\nstepscope: not a terminal; using plain lines\n"


def test_a_hub_elsewhere_with_a_token_that_is_in_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "runs", "slow", SLOW.run(), sealed=False)
    hub = ServedFolder(tmp_path / "runs")
    try:
        monkeypatch.setenv("STEPSCOPE_TOKEN", hub.token)
        assert run_command(["watch", "--plain", hub.url]) == 0
        assert matches(capsys.readouterr().out)
        (tmp_path / "token").write_text(f"{hub.token}\n")
        monkeypatch.delenv("STEPSCOPE_TOKEN")
        assert run_command(["watch", "--plain", f"{hub.url}/#/run/slow", "--token-file", str(tmp_path / "token")]) == 0
        assert matches(capsys.readouterr().out)
        monkeypatch.setenv("STEPSCOPE_TOKEN", "wrong")
        with pytest.raises(HubRefused, match="rejected this token"):
            run_command(["watch", "--plain", hub.url, "slow"])
        monkeypatch.setenv("STEPSCOPE_TOKEN", hub.token)
        with pytest.raises(HubMissing, match="no such run"):
            run_command(["watch", "--plain", hub.url, "other"])
    finally:
        hub.stop()
    with pytest.raises(HubError, match="cannot be reached: Connection refused"):
        run_command(["watch", "--plain", hub.url, "slow"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["http://h:1/#/run/x?token=abc"], "that link contains the token"),
        (["http://h:1"], "the hub requires a token: pass --token-file FILE or set STEPSCOPE_TOKEN"),
        (["http://h:1", "--token-file", "nowhere"], "cannot read the token file nowhere"),
        (["https://u:p@h:1", "--token-file", "token"], "is not the URL of a hub"),
        (["https://h:1", "--token-file", "token", "--fingerprint", "12"], "64 hexadecimal digits"),
        (["one", "two"], "one is not the URL of a hub"),
        (["one", "--fingerprint", "12"], "for a remote hub"),
        ([], r"no runs in .*/runs yet"),
    ],
)
def test_what_cannot_be_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], why: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPSCOPE_TOKEN", raising=False)
    (tmp_path / "token").write_text("secret")
    with pytest.raises(UsageError, match=why):
        run_command(["watch", *words])


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        run_command(["watch", str(tmp_path)])


def test_the_newest_that_goes_on_is_preferred(tmp_path: Path) -> None:
    going = Feed(tmp_path / "runs", "going", SLOW)
    over = record(tmp_path / "runs", "over", SLOW.run(), sealed=False)
    assert newest_run(tmp_path / "runs") == over
    assert newest_run(tmp_path / "runs", prefer_live=True) == going.run_dir


def test_where_a_run_of_this_machine_is_looked_at(tmp_path: Path) -> None:
    """At its own hub while it has one; when that is gone with the job, at one that ends with us."""
    going = Feed(tmp_path / "runs", "going", Cluster(ranks=1, steps=5))
    write_hub_file(going.run_dir, HubFile(url="http://127.0.0.1:1", token="theirs"))
    local = LocalRun(going.run_dir)
    try:
        assert (local.where().url, local.where().run) == ("http://127.0.0.1:1", "going")
        remove_hub_file(going.run_dir)
        with pytest.raises(HubError, match="its summary is being written"):
            local.where()
        going.end()
        place = local.where()
        assert place.url.startswith("http://127.0.0.1:")
        assert place.token not in repr(place)
        (process,) = psutil.Process().children()
        assert place.token not in " ".join(process.cmdline())
        assert local.where() == place
    finally:
        local.close()
    assert not process.is_running()
    with pytest.raises(HubError):
        local.where()
