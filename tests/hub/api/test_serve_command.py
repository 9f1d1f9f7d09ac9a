"""``stepscope serve`` as a user starts it: where it listens, what it says, how it ends, what it takes."""

from __future__ import annotations

import hashlib
import json
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fakes.cluster import Cluster

from stepscope.cli.hub import serve as command
from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.hub.audit import read_audit
from stepscope.store.documents import read_meta, write_meta
from stepscope.store.load import open_run
from stepscope.store.user_runs import UserHub, add_folder, find_user_hub, run_id


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tmp").mkdir()
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "TMPDIR": str(tmp_path / "tmp")}


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, process.stderr.read() if process.stderr else ""
    return line


def ask(url: str, token: str, path: str, context: ssl.SSLContext | None = None) -> Any:
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return json.loads(answer.read())


def token_file(tmp_path: Path, url: str) -> Path:
    return tmp_path / "config" / "stepscope" / f"serve-{url.rpartition(':')[2]}.token"


def test_a_folder_is_served_to_whoever_can_read_the_token_file(
    commands: Any, folder: Path, home: dict[str, str], tmp_path: Path
) -> None:
    process = commands.start("serve", folder, "--port", "0", env=home)
    url = url_of(process)
    assert url.startswith("http://127.0.0.1:")
    place = token_file(tmp_path, url)
    assert place.stat().st_mode & 0o777 == 0o600
    token = place.read_text().strip()
    assert ask(url, token, "/api/v1/runs")["total"] == 3
    assert ask(url, token, "/api/v1/runs/plain")["step"] == 39
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(url, "wrong", "/api/v1/runs")
    process.send_signal(signal.SIGINT)
    done = commands.finish(process)
    assert done.code == 0
    assert token not in done.stdout + done.stderr
    assert f"the token is in {place}" in done.stderr
    assert not place.exists(), "it goes with the server, and the next one has another"
    noted = list(read_audit(tmp_path / "config" / "stepscope" / "audit.jsonl"))
    assert [(line["event"], line["run"], line["status"]) for line in noted] == [
        ("read", "", 200),
        ("read", "plain", 200),
        ("refused", "", 401),
    ]
    assert {line["served"] for line in noted} == {str(folder.resolve())}
    assert not (folder / "audit.jsonl").exists(), "a folder that is served is not written to"
    repeated = commands.start("serve", folder / "plain", "--port", url.rpartition(":")[2], env=home)
    assert url_of(repeated) == url
    assert ask(url, other := place.read_text().strip(), "/api/v1/runs")["total"] == 1
    assert other != token
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(url, token, "/api/v1/runs")
    repeated.send_signal(signal.SIGTERM)
    assert commands.finish(repeated).code == 0


def test_for_others_it_speaks_tls(commands: Any, folder: Path, home: dict[str, str], tmp_path: Path) -> None:
    process = commands.start("serve", folder, "--port", "0", "--host", "0.0.0.0", env=home)
    parts = urlsplit(url_of(process))
    assert parts.scheme == "https"
    certificate = ssl.get_server_certificate(("127.0.0.1", parts.port or 0))
    seen = hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()
    context = ssl.create_default_context(cadata=certificate)
    token = token_file(tmp_path, f":{parts.port}").read_text().strip()
    assert ask(f"https://127.0.0.1:{parts.port}", token, "/api/v1/runs", context)["total"] == 3
    process.send_signal(signal.SIGINT)
    done = commands.finish(process)
    assert (done.code, seen in done.stderr) == (0, True)
    assert list((tmp_path / "tmp").glob("stepscope-tls-*")) == []


@pytest.mark.parametrize(
    ("run", "link"), [("", "http://x:1/#token=s%2Fcret"), ("a b", "http://x:1/#/run/a%20b?token=s%2Fcret")]
)
def test_a_terminal_gets_a_link_that_signs_in_and_a_pipe_only_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: str, link: str
) -> None:
    command._tell("runs", "http://x:1", run, Path("t"), "s/cret")
    piped = capsys.readouterr()
    assert (piped.out, "cret" in piped.err) == ("http://x:1\n", False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    command._tell("runs", "http://x:1", run, Path("t"), "s/cret")
    assert capsys.readouterr().out == f"{link}\n"


def test_open_shows_the_page_and_hides_the_token_from_the_machine(
    commands: Any, folder: Path, home: dict[str, str], tmp_path: Path
) -> None:
    """The browser is a script here that keeps the words it was started with, and the file they name."""
    browser = tmp_path / "browser"
    browser.write_text('#!/bin/sh\necho "$@" > words\ncp "${1#file://}" page.html\nstat -c %a "${1#file://}" > mode\n')
    browser.chmod(0o755)
    more = {"BROWSER": str(browser), "XDG_RUNTIME_DIR": home["TMPDIR"]}
    process = commands.start("serve", folder / "plain", "--port", "0", "--open", env=home | more)
    url = url_of(process)
    token = token_file(tmp_path, url).read_text().strip()
    assert ask(url, token, "/api/v1/runs")["total"] == 1  # it serves, so the browser was started before
    words = (tmp_path / "words").read_text().strip()
    assert (words.startswith(f"file://{home['TMPDIR']}/stepscope-open-"), token in words) == (True, False)
    assert f'content="0; url={url}/#/run/plain?token={token}"' in (tmp_path / "page.html").read_text()
    assert (tmp_path / "mode").read_text() == "600\n"
    process.send_signal(signal.SIGINT)
    assert commands.finish(process).code == 0
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "there is no folder .*/runs; specify a run or a folder of runs"),
        (["open"], "not a folder"),
        ([".", "--port", "70000"], "--port: must be a port from 0 to 65535, not '70000'"),
        ([".", "--tls-cert", "x.pem"], "must be used together"),
        ([".", "--tls-cert", "x.pem", "--tls-key", "x.key", "--no-tls"], "cannot be used together"),
        ([".", "--tls-cert", "x.pem", "--tls-key", "open"], "--tls-cert x.pem: no such file"),
        ([".", "--token-file", "open"], "other users can read the token"),
        ([".", "--token-file", "short"], "cut off"),
        (["--all", "short"], "--all serves all your runs; omit short"),
        (["--all", "--accept"], "--accept and --join need one folder"),
    ],
)
def test_what_cannot_be_served_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open").write_text("x" * 64)
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "short").write_text("x")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(UsageError, match=why):
        run_command(["serve", *words])


def test_nodes_hand_in_what_they_still_hold(
    commands: Any, record_run: Any, home: dict[str, str], tmp_path: Path
) -> None:
    """A job of two nodes, one of which could not send: it sends to ``serve --accept``, and the run is whole."""
    whole = Cluster(ranks=4, steps=30, hosts=2).run()
    run_dir = record_run(tmp_path / "runs", "job", _of_host(whole, "node0"))
    write_meta(run_dir, {**read_meta(run_dir), "nnodes": 2})
    spool = record_run(tmp_path / "kept", "job.node1", _of_host(whole, "node1"), sealed=False)
    hub = {"url": "https://127.0.0.1:1", "run": "job", "node": 1, "nnodes": 2}
    write_meta(spool, {**read_meta(spool), "hub": hub})
    process = commands.start("serve", "runs", "--port", "0", "--accept", env=home)
    url = url_of(process)
    token = token_file(tmp_path, url).read_text().strip()
    assert ask(url, token, "/api/v1/runs/job")["ranks"] == 2
    sent = commands.finish(commands.start("send", spool, "--to", url, env=home))
    assert (sent.code, spool.exists()) == (0, False), sent.stderr
    stranger = {**home, "XDG_CONFIG_HOME": str(tmp_path / "other")}
    spool = record_run(tmp_path / "kept", "alone", _of_host(whole, "node1"), sealed=False)
    write_meta(spool, {**read_meta(spool), "hub": hub})
    assert commands.finish(commands.start("send", spool, "--to", url, env=stranger)).code != 0
    process.send_signal(signal.SIGINT)
    assert commands.finish(process).code == 0
    run = open_run(run_dir)
    assert [(series.rank, len(series.steps)) for series in run.ranks] == [(rank, 30) for rank in range(4)]
    assert json.loads((run_dir / "summary.json").read_bytes())["steps"]["compared"] == 30


def _of_host(run: Any, host: str) -> Any:
    return replace(run, ranks=tuple(series for series in run.ranks if series.identity.host == host))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--trust-header", "X-User", "--host", "0.0.0.0"], "loopback only"),
        (["--trust-header", "X-User", "--host", "0.0.0.0", "--proxy-user", "root", "--grant", "x"], "must be USER="),
        (["--trust-header", "Authorization"], "not a usable header name"),
        (["--trust-header", "X-User", "--proxy-user", "nobody-of-that-name"], "no such user"),
        (["--proxy-user", "root"], "needs --trust-header"),
        (["--proxy-address", "10.0.0.5"], "--proxy-address needs --trust-header"),
        (["--grant", "anna=label"], "--grant needs --trust-header"),
        (["--trust-header", "X-User", "--grant", "anna"], "must be USER=ROLE"),
        (["--trust-header", "X-User", "--grant", "anna=admin"], "there is no role 'admin'"),
        (["--trust-header", "X-User", "--proxy-address", "proxy.example"], "must be an IP address"),
        (["--trust-header", "X-User", "--proxy-address", "127.0.0.1"], "is for other machines"),
        (["--trust-header", "X-User", "--proxy-address", "10.0.0.5", "--no-tls"], "needs TLS"),
    ],
)
def test_a_proxy_is_trusted_on_this_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=why):
        run_command(["serve", ".", *words])


@pytest.mark.soak  # near: test_user_hub.py, without a process of its own
def test_all_runs_of_a_user_keep_their_address(
    commands: Any, record_run: Any, home: dict[str, str], tmp_path: Path
) -> None:
    """Folders become known by ``stepscope run``; the port is given here, since others may use the fixed one."""
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    first = record_run(tmp_path / "one", "night", Cluster(ranks=1, steps=5).run())
    add_folder(first.parent, state)
    process = commands.start("serve", "--all", "--port", "0", env=home | state)
    url = url_of(process)
    place = tmp_path / "config" / "stepscope" / "serve-all.token"
    token = place.read_text().strip()
    assert find_user_hub(state) == UserHub(url=url, token=token, token_file=str(place))
    assert [row["id"] for row in ask(url, token, "/api/v1/runs")["runs"]] == [run_id(first)]
    two = record_run(tmp_path / "two", "night", Cluster(ranks=1, steps=7).run())
    add_folder(two.parent, state)
    assert ask(url, token, f"/api/v1/runs/{run_id(two)}")["newest_step"] == 6
    second = commands.finish(commands.start("serve", "--all", env=home | state))
    assert (second.code, second.stdout) == (0, f"{url}\n")
    assert "your hub is already running" in second.stderr
    process.send_signal(signal.SIGTERM)
    done = commands.finish(process)
    assert (done.code, token in done.stdout + done.stderr) == (0, False)
    assert "serving all your runs (1 folder so far)" in done.stderr
    assert find_user_hub(state) is None
    repeated = commands.start("serve", "--all", "--port", url.rpartition(":")[2], env=home | state)
    assert url_of(repeated) == url
    assert ask(url, token, "/api/v1/runs")["total"] == 2, "the token is kept"
    repeated.send_signal(signal.SIGINT)
    assert commands.finish(repeated).code == 0
