"""Who may ask, what a browser is told, and that no question whatever makes the hub stumble."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.responses import Response

from stepscope.hub.api import auth as readers_module
from stepscope.hub.api.auth import OPEN_PATHS, Reader, Readers
from stepscope.hub.api.responses import POLICY, json_body
from stepscope.hub.api.stream import Streams
from stepscope.hub.app import resources_of
from stepscope.hub.runs import Runs
from stepscope.page import assets

READER = "reader-token-of-the-tests"
RESOURCES = resources_of(Streams(), lambda: "", ingest=False)
FILLED = {"{run}": "demo", "{rank}": "3", "{path:path}": "logs/rank-0.log", "{sweep}": "none", "{number}": "1"}
FILLED |= {"{capture}": "step-9", "{file}": "rank-0.pt.trace.json.gz", "{trace}": "none"}


def filled(path: str) -> str:
    for name, value in FILLED.items():
        path = path.replace(name, value)
    assert "{" not in path
    return path


PATHS = [filled(resource.path) for resource in RESOURCES]
ASKED = [path for path in PATHS if not path.endswith("/stream")]


@pytest.mark.parametrize("path", [*PATHS, "/nowhere", "/api/v1/runs/demo/nothing", "/api/v2/runs"])
def test_nothing_of_a_run_is_told_without_the_token(hub: Any, path: str) -> None:
    if path in OPEN_PATHS:
        assert hub.get(path, token=None).status == 200
        return
    for wrong in (None, "", "x", READER[:-1], READER + "x", "é"):
        if wrong is None:
            answer = hub.get(path, token=None)
        else:
            answer = hub.get(path, token=None, authorization=f"Bearer {wrong}".encode("latin-1"))  # type: ignore[arg-type]
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json.keys() == {"schema", "error"}
    assert hub.get(path + "?token=" + READER, token=None).status == 401
    assert hub.get(path, token=None, authorization=f"Basic {READER}").status == 401
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        assert hub.get(path, token=None, method=method).status == 401


def test_what_is_open_is_what_is_declared_open() -> None:
    declared = {resource.path for resource in RESOURCES if resource.open}
    assert declared == OPEN_PATHS - {"/", readers_module.SESSION_PATH}


@pytest.mark.parametrize("path", [*ASKED, "/", "/nowhere", readers_module.SESSION_PATH])
def test_every_answer_is_safe_for_a_browser(hub: Any, path: str) -> None:
    for token in (READER, None):
        answer = hub.get(path, token=token)
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"
        if path != "/":
            assert answer.headers.get("cache-control") == ("no-store" if path != "/nowhere" else None)
        assert "access-control-allow-origin" not in answer.headers
    assert "unsafe" not in POLICY
    assert "*" not in POLICY


def test_only_reading_is_possible(hub: Any) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        answer = hub.get("/api/v1/runs/demo", method=method)
        assert (answer.status, answer.json["error"]) == (405, "method not allowed")
    assert hub.get("/api/v1/runs/demo", method="HEAD").status == 200


@pytest.mark.parametrize("built", [True, False])
def test_the_home_page_needs_nothing_and_tells_nothing(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: bool
) -> None:
    """Built by hand here: a checkout may have no Node.js."""
    monkeypatch.setattr(assets, "STATIC", tmp_path)
    assets.find_asset.cache_clear()
    if built:
        (tmp_path / "assets").mkdir()
        (tmp_path / "index.html").write_text("<!doctype html><script src=./assets/page.js></script>")
        (tmp_path / "assets/page.js").write_text("// the page")
    answer = hub.get("/", token=None)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html" if built else "text/plain")
    assert b"demo" not in answer.body
    script = hub.get("/assets/page.js", token=None)
    assert (script.status, script.body) == (200, b"// the page") if built else script.status == 404
    for other in ("/assets/..%2findex.html", "/assets/.hidden", "/assets/sub/page.js", "/assets/"):
        assert hub.get(other, token=None).status == 404
    assets.find_asset.cache_clear()


# ── the session of a browser ────────────────────────────────────────────────────────────────────────────────────────


def test_a_browser_gets_a_cookie_for_the_token(hub: Any) -> None:
    with httpx.Client(base_url=hub.url) as browser:
        assert browser.get("/api/v1/runs").status_code == 401
        assert browser.post("/api/v1/session", json={"token": "wrong"}).status_code == 401
        answer = browser.post("/api/v1/session", json={"token": READER})
        assert answer.status_code == 200
        cookie = answer.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert READER not in cookie
        assert browser.get("/api/v1/runs").status_code == 200
        assert browser.delete("/api/v1/session").status_code == 200
        assert browser.get("/api/v1/runs").status_code == 401


def test_a_copy_of_a_cookie_reads_nothing_after_its_browser_signed_out(hub: Any) -> None:
    """Also not what it was reading: the stream of a run ends."""
    with httpx.Client(base_url=hub.url) as browser:
        browser.post("/api/v1/session", json={"token": READER})
        stolen = dict(browser.cookies)
        with httpx.Client(base_url=hub.url, cookies=stolen) as thief:
            assert thief.get("/api/v1/runs").status_code == 200
            assert browser.delete("/api/v1/session").status_code == 200
            assert thief.get("/api/v1/runs").status_code == 401
            assert thief.post("/api/v1/session").status_code == 401
        # The same person may come again at once, even within the same second.
        assert browser.post("/api/v1/session", json={"token": READER}).status_code == 200
        assert browser.get("/api/v1/runs").status_code == 200


def test_a_session_that_was_signed_out_stays_so_whatever_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    readers = Readers(READER, now=lambda: now[0])

    def sign_in() -> Headers:
        response = Response()
        readers.open_session(response, "me")
        return Headers({"cookie": response.headers["set-cookie"].split(";")[0]})

    def sign_out(cookie: Headers) -> None:
        readers.end_session(Response(), readers.session(cookie, "me")[0])

    first, second = sign_in(), sign_in()
    reader = readers.admits(first, "me")
    assert isinstance(reader, Reader)
    assert readers.holds(reader, "/api/v1/runs")
    sign_out(first)
    assert readers.admits(first, "me") is False
    assert not readers.holds(reader, "/api/v1/runs"), "an open stream ends"
    assert readers.admits(second, "me")
    now[0] += 2 * readers_module.SESSION_S
    sign_out(sign_in())
    now[0] -= 2 * readers_module.SESSION_S
    assert readers.admits(first, "me") is False
    now[0] -= readers_module.CLOCK_SLACK_S
    assert readers.admits(second, "me"), "a small correction of the clock ends nothing"
    now[0] -= 1
    assert readers.admits(second, "me") is False, "a clock that is set back does not make sessions longer"
    monkeypatch.setattr(readers_module, "ENDED_SESSIONS", 3)
    for _ in range(9):
        sign_out(sign_in())
    assert len(readers._ended) == 3


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"nothing", b'{"token": 3}', b"\xff", b"[" * 3000, b"x" * 9000])
def test_a_session_for_nonsense_is_refused(hub: Any, body: bytes) -> None:
    answer = httpx.post(f"{hub.url}/api/v1/session", content=body)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert hub.get("/api/v1/session").status == 405


def test_cookies_cannot_be_made_up_and_run_out() -> None:
    now = [1000.0]
    readers = Readers(READER, now=lambda: now[0], secure=True)
    response = Response()
    readers.open_session(response)
    cookie = response.headers["set-cookie"]
    assert "; Secure" in cookie
    assert cookie.startswith("__Host-stepscope-")
    pair = cookie.split(";")[0]

    def admitted(text: str) -> Any:
        return readers.admits(Headers({"cookie": text}))

    assert admitted(pair) == Reader(via="hub token")
    name, _, value = pair.partition("=")
    expires, token_id, session, signature = value.split(".")
    assert token_id == ""
    for wrong in (
        "",
        "x",
        f"{int(expires) + 1}..{session}.{signature}",
        f"{expires}..{signature}",
        f"{expires}.{'0' * 32}.{session}.{signature}",
        f"{expires}..{'0' * 32}.{signature}",
        f"{expires}..{session}. {signature}",
        f"{expires}..{session}.",
        f"{expires}..{session}.{'0' * 64}",
        f"{expires}.\xe9.{session}.{signature}",
        f"{'9' * 40}.x",
        ".",
    ):
        assert not admitted(f"{name}={wrong}")
    assert admitted("another=1") is None
    assert Readers("another token", now=lambda: now[0], secure=True).admits(Headers({"cookie": pair})) is None
    now[0] += readers_module.SESSION_S
    assert admitted(pair) is False


def test_a_cookie_is_worth_nothing_elsewhere_and_renews_nothing(hub: Any) -> None:
    """Browsers send it to every port of the host, so another server there may have it."""
    now = [1000.0]
    readers = Readers(READER, now=lambda: now[0], port=7070)
    response = Response()
    readers.open_session(response, "127.0.0.1 1000")
    pair = response.headers["set-cookie"].split(";")[0]
    headers = Headers({"cookie": pair})
    assert pair.startswith("stepscope-7070-")
    assert readers.admits(headers, "127.0.0.1 1000") == Reader(via="hub token")
    assert readers.admits(headers, "127.0.0.1 1001") is False, "another user of this machine"
    assert readers.admits(headers, "10.0.0.9 ") is False, "from another machine"
    assert Readers(READER, now=lambda: now[0], port=7071).admits(headers, "127.0.0.1 1000") is None
    now[0] += 1000
    assert readers.session(headers, "127.0.0.1 1000")[1] == readers_module.SESSION_S - 1000
    with httpx.Client(base_url=hub.url) as browser:
        assert "set-cookie" in browser.post("/api/v1/session", json={"token": READER}).headers
        answer = browser.post("/api/v1/session")
        assert (answer.status_code, "set-cookie" in answer.headers) == (200, False)
        assert 0 < answer.json()["seconds"] <= readers_module.SESSION_S


def test_an_ipv4_address_is_the_same_on_a_socket_for_ipv6() -> None:
    """Otherwise all of them would be one /64, and share its limits."""
    assert readers_module.address_of({"client": ("::ffff:10.0.0.9", 5)}) == "10.0.0.9"


def test_a_hub_without_a_token_is_no_hub() -> None:
    with pytest.raises(ValueError, match="token"):
        Readers("")


def test_wrong_tokens_are_counted_and_slowed_but_nobody_else() -> None:
    clock, slept = [0.0], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    readers = Readers(READER, clock=lambda: clock[0], sleep=sleep)

    async def wrong(address: str, times: int = 1) -> None:
        for _ in range(times):
            assert (await readers.refuse({"client": (address, 1)}, tried=True)).status_code == 401

    asyncio.run(wrong("a", 8))
    assert slept == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    asyncio.run(wrong("b"))
    assert slept[-1] == 0.05
    clock[0] = 61.0
    asyncio.run(wrong("a"))
    assert slept[-1] == 0.05
    asyncio.run(readers.refuse({"client": ("c", 1)}, tried=False))
    assert len(slept) == 10
    assert readers.refused == 10
    for number in range(2 * readers_module.ADDRESSES):
        asyncio.run(wrong(str(number)))
    assert len(readers._wrong) == readers_module.ADDRESSES


def test_those_who_wait_for_their_refusal_are_bounded() -> None:
    async def run() -> list[int]:
        event = asyncio.Event()

        async def sleep(_seconds: float) -> None:
            await event.wait()

        readers = Readers(READER, sleep=sleep)
        waiting = [
            asyncio.create_task(readers.refuse({"client": (str(i), 1)}, tried=True))
            for i in range(readers_module.WAITING + 5)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        early = [task.result().status_code for task in waiting if task.done()]
        event.set()
        await asyncio.gather(*waiting)
        return early

    assert asyncio.run(run()) == [429] * 5


def test_the_token_is_in_no_answer_and_no_file(hub: Any, folder: Path) -> None:
    for path in ASKED:
        assert READER.encode() not in hub.get(path).body
    assert not any(READER.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_files_are_listed_and_read_in_pieces(hub: Any, folder: Path) -> None:
    paths = [entry["path"] for entry in hub.get("/api/v1/runs/demo/files").json["files"]]
    assert paths == ["events.jsonl", "logs/rank-0.log", "flight/rank_3.json"]
    log = "/api/v1/runs/demo/files/logs/rank-0.log"
    whole = (folder / "demo/logs/rank-0.log").read_bytes()
    assert hub.get(log).body == whole
    tail = hub.get(f"{log}?tail=20")
    assert (tail.body, tail.headers["content-type"]) == (b"line 98\nline 99\n", "text/plain; charset=utf-8")
    assert int(tail.headers["x-stepscope-offset"]) == len(whole) - 16
    assert int(tail.headers["x-stepscope-size"]) == len(whole)
    assert hub.get(f"{log}?offset=10&most=5").body == whole[10:15]
    assert hub.get(f"{log}?offset=10000000").body == b""
    assert hub.get(f"{log}?offset=1&tail=1").status == 400
    assert hub.get("/api/v1/runs/demo/files/run.json").json["command"] == ["python", "train.py"]
    assert "session" not in hub.get("/api/v1/runs/demo/files/run.json").json


REFUSED = (
    "hub.json",
    "../demo/events.jsonl",
    "logs/../run.json",
    "logs/..%2f..%2fplain%2frun.json",
    "logs//rank-0.log",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "logs",
    "logs/",
    "logs/.hidden.log",
    "logs/rank-0.log%00.json",
    "logs/link.log",
    "logs/folder.log",
    "logs/pipe.log",
    "errors/link/x.json",
    "steps.parquet",
    "samples.jsonl",
    "inbox/000001.frames",
    "logs/" + "a" * 500 + ".log",
)


def test_no_other_file_is_given_out(serve: Any, folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "plain"
    shutil.copytree(folder / "plain", run_dir)
    (tmp_path / "secret.log").write_text("secret")
    (tmp_path / "x.json").write_text("secret")
    (run_dir / "hub.json").write_text("secret")
    (run_dir / "logs/link.log").symlink_to(tmp_path / "secret.log")
    (run_dir / "logs/folder.log").mkdir()
    (run_dir / "logs/.hidden.log").write_text("secret")
    (run_dir / "errors/link").symlink_to(tmp_path)
    os.mkfifo(run_dir / "logs/pipe.log")
    hub = serve(lambda: Runs.of_folder(tmp_path / "runs"))
    for path in REFUSED:
        answer = hub.get(f"/api/v1/runs/plain/files/{path}")
        assert (path, answer.status) == (path, 404)
        assert b"secret" not in answer.body
    listed = [entry["path"] for entry in hub.get("/api/v1/runs/plain/files").json["files"]]
    assert listed == ["logs/rank-0.log", "hangs/node0-1.json"]
    shutil.rmtree(run_dir / "logs")
    (run_dir / "logs").symlink_to(folder / "plain" / "logs")
    assert hub.get("/api/v1/runs/plain/files/logs/rank-0.log").status == 404
    listed = [entry["path"] for entry in hub.get("/api/v1/runs/plain/files").json["files"]]
    assert listed == ["hangs/node0-1.json"]


# ── forms of answers ────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_known_is_not_sent_again(hub: Any) -> None:
    first = hub.get("/api/v1/runs/demo/steps")
    answer = hub.get("/api/v1/runs/demo/steps", if_none_match=f'"other", {first.headers["etag"]}')
    assert (answer.status, answer.body) == (304, b"")
    assert hub.get("/api/v1/runs/demo/steps", if_none_match='"other"').status == 200


def test_large_answers_are_packed_for_those_who_can_unpack(hub: Any) -> None:
    plain = hub.get("/api/v1/runs/demo/steps")
    packed = hub.client.get(
        "/api/v1/runs/demo/steps", headers={"Authorization": f"Bearer {READER}", "Accept-Encoding": "br, gzip;q=0.5"}
    )
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(plain.body) / 2
    assert packed.content == plain.body
    assert "content-encoding" not in hub.get("/api/v1/runs/demo/steps", accept_encoding="gzip;q=0").headers


def test_openapi_is_what_the_router_does(hub: Any, root: Path) -> None:
    document = hub.get("/api/v1/openapi.json").json
    assert document["openapi"].startswith("3.")
    assert set(document["paths"]) == {re.sub(r":\w+}", "}", resource.path) for resource in RESOURCES}
    for path, operations in document["paths"].items():
        operation = operations["get"]
        assert {p["name"] for p in operation["parameters"] if p["in"] == "path"} == set(re.findall(r"{(\w+)}", path))
        assert operation["summary"].endswith(".")
    page = (root / "docs/api.md").read_text()
    for resource in RESOURCES:
        assert re.sub(r":\w+}", "}", resource.path) in page, f"docs/api.md does not tell of {resource.path}"
        for parameter in resource.parameters:
            assert f"`{parameter.name}`" in page, f"docs/api.md does not explain {parameter.name}"


# ── any question whatever ───────────────────────────────────────────────────────────────────────────────────────────

WORDS = st.one_of(
    st.sampled_from(["", "0", "-1", "1", "599", "600", "1-2", "2-1", "-", "1e9", "NaN", "inf", "work", "comm", "max"]),
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.text(max_size=20),
)


@given(
    path=st.sampled_from(ASKED),
    query=st.lists(
        st.tuples(st.sampled_from([p.name for r in RESOURCES for p in r.parameters] + ["x", ""]), WORDS), max_size=4
    ),
    accept=st.sampled_from(["*/*", "application/vnd.stepscope.heat", ";;,,", "application/json"]),
)
@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_parameter_makes_it_stumble(hub: Any, path: str, query: list[tuple[str, str]], accept: str) -> None:
    params = {name: value.encode("utf-8", "replace") for name, value in query}
    text = str(httpx.QueryParams({name: value.decode() for name, value in params.items()}))
    answer = hub.get(f"{path}?{text}", accept=accept)
    missing = "/none" in path or "/captures/step-9" in path  # the run has no capture
    good = 503 if path == "/api/v1/fleet" else 200  # tests have no folder for the catalog of all runs
    assert answer.status in ((400, 404) if missing else (good, 400))
    if answer.status == 400:
        assert answer.json.keys() == {"schema", "error"}


@pytest.mark.parametrize("resource", [r for r in RESOURCES if r.parameters], ids=lambda r: r.path)
def test_every_parameter_is_held_to_its_bounds(hub: Any, resource: Any) -> None:
    path = filled(resource.path)
    for parameter in resource.parameters:
        wrong = ["x" * 20_000]
        if parameter.kind == "integer":
            wrong += [str(parameter.least - 1), str(parameter.most + 1), "1.0", "0x10", "１", "+1", " 1", "1_0", "nan"]
        elif parameter.kind == "choice":
            wrong += ["nothing", "MAX"]
        elif parameter.kind == "span":
            wrong += ["2-1", "a-b", "1-", "-1", "1-2-3", f"0-{1 << 40}"]
        elif parameter.kind == "texts":
            wrong += [",".join("x" * 300), "x" * 300]
        for text in wrong:
            if len(text) > 10_000 and parameter.kind == "texts":
                continue
            answer = hub.get(f"{path}?{parameter.name}={quote(text, safe='')}")
            assert answer.status in (400, 431), (parameter.name, text[:40])
    assert hub.get(f"{path}?unheard_of=1").status == 400


def test_comparisons_take_as_long_whatever_is_compared() -> None:
    source = inspect.getsource(Readers.right) + inspect.getsource(Readers._with_cookie)
    assert source.count("compare_digest") == 2
    assert " == " not in source


def test_answers_hold_what_utf8_cannot() -> None:
    document = json.loads(json_body({"a": ["\ud800", float("nan"), {"b\ud800": 1}]}))
    assert document == {"schema": 1, "a": ["\\ud800", None, {"b\\ud800": 1}]}
