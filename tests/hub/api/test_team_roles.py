"""One hub for a team: what each role may do, who says so, and who is named for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from alert_messages import incident
from fakes.cluster import Cluster

from stepscope.alerts.incident_file import append_incident
from stepscope.alerts.requests import RequestDesk
from stepscope.errors import UsageError
from stepscope.hub.api.auth import (
    ALL,
    ROLES,
    Readers,
    ReaderTokens,
    Role,
    TrustedProxy,
    checked_roles,
    run_scope,
)
from stepscope.hub.app import make_app
from stepscope.hub.audit import CHANGES, AuditLog, read_audit
from stepscope.hub.runs import Runs
from stepscope.store.documents import read_meta, write_meta
from tests.hub.run_parts import READER, Hub, record

USERS = {"night": "anna", "day": "ben"}
NOW_S, LONG_S = 2e9, 1e10


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("team") / "runs"
    for name, user in USERS.items():
        run_dir = record(folder, name, Cluster(ranks=2, steps=12).run())
        write_meta(run_dir, {**read_meta(run_dir), "user": user})
        append_incident(run_dir, incident())
    return folder


@pytest.fixture
def audit(tmp_path: Path) -> AuditLog:
    return AuditLog(path=tmp_path / "audit.jsonl")


Start = Callable[..., Hub]


@pytest.fixture
def start(runs: Path, tokens: ReaderTokens, audit: AuditLog, start_hub: Callable[..., Hub]) -> Start:
    def begin(trusted: TrustedProxy | None = None, **options: bool) -> Hub:
        def make() -> Any:
            readers = Readers(READER, named=tokens, trusted=trusted, audit=audit)
            return make_app(Runs.of_folder(runs), readers, **(options or {"changes": True}))

        return start_hub(make)

    return begin


def token_of(tokens: ReaderTokens, name: str, *roles: Role, scope: str = ALL) -> dict[str, str]:
    made = tokens.create(name, scope, now_s=NOW_S, seconds=LONG_S, roles=roles)
    return {"Authorization": f"Bearer {made}"}


def label(hub: Hub, headers: Mapping[str, str], run: str = "night", note: str = "x") -> int:
    return post(hub, f"{run}/labels", {"note": note}, headers).status_code


def post(hub: Hub, path: str, body: Any, headers: Mapping[str, str]) -> httpx.Response:
    headers = {"Content-Type": "application/json", **headers}
    return hub.client.post(f"/api/v1/runs/{path}", content=json.dumps(body), headers=headers)


def changes(hub: Hub, headers: Mapping[str, str]) -> dict[Role, list[int]]:
    """The answers to a request for everything that a role allows."""
    return {
        "label": [label(hub, headers)],
        "alerts": [
            post(hub, "night/incidents/1/acknowledge", {}, headers).status_code,
            post(hub, "night/silences", {"seconds": 60}, headers).status_code,
            hub.client.delete("/api/v1/runs/night/silences/none", headers=headers).status_code,
        ],
        "capture": [post(hub, "night/captures", {}, headers).status_code],
        "delete": [hub.client.delete("/api/v1/runs/day", headers=headers).status_code],
    }


ALLOWED: dict[Role, list[int]] = {
    "label": [200],
    "alerts": [200, 200, 404],
    "capture": [409],  # the run has ended
    "delete": [200],
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("through", ["token", "proxy"])
def test_a_role_allows_what_it_says_and_nothing_else(
    start: Start, tokens: ReaderTokens, runs: Path, role: Role, through: str
) -> None:
    if through == "token":
        hub, headers = start(), token_of(tokens, "anna", role)
    else:
        hub = start(
            TrustedProxy(header="X-User", addresses=frozenset(["127.0.0.1"]), roles={"anna": frozenset([role])})
        )
        headers = {"X-User": "anna", "Sec-Fetch-Site": "same-origin"}
    may = hub.client.get("/api/v1/runs", headers=headers).json()["may"]
    assert may == [role] * (role in ("label", "delete"))
    incidents = hub.client.get("/api/v1/runs/night/incidents/1", headers=headers).json()
    assert incidents["may"] == []  # the run is over
    refused = {each: [403] * len(ALLOWED[each]) for each in ROLES}
    assert changes(hub, headers) == {**refused, role: ALLOWED[role]}
    assert (runs / "day").exists() is (role != "delete")


def test_a_hub_offers_less_than_the_roles(start: Start, tokens: ReaderTokens) -> None:
    headers = token_of(tokens, "anna", *ROLES)
    hub = start(changes=False)
    assert {status for answers in changes(hub, headers).values() for status in answers} <= {404, 405}
    job = start(requests=True)
    assert hub.client.get("/api/v1/runs", headers=headers).json()["may"] == []
    assert changes(job, headers) == {**ALLOWED, "label": [404], "delete": [405]}


@pytest.mark.parametrize(
    "headers",
    [
        [("X-User", "root")],
        [("X-User", "anna"), ("X-User", "root")],
        [("X-User", "anna"), ("x-user", "anna")],
        [("X-User", "a" * 129)],
        [("X-User", b"an\x85na")],
        [("X-User", "")],
        [("X_User", "anna")],
        [("X-Forwarded-User", "anna"), ("X-Forwarded-For", "127.0.0.1"), ("Forwarded", "for=127.0.0.1")],
    ],
)
def test_a_header_that_the_proxy_did_not_write_names_nobody(start: Start, headers: list[tuple[str, Any]]) -> None:
    elsewhere = start(TrustedProxy(header="X-User", addresses=frozenset(["10.0.0.5"]), roles={"*": frozenset(ROLES)}))
    here = start(TrustedProxy(header="X-User", addresses=frozenset(["127.0.0.1"]), roles={"anna": frozenset(ROLES)}))
    assert elsewhere.client.get("/api/v1/runs", headers=headers).status_code == 401
    assert elsewhere.client.delete("/api/v1/runs/day", headers=headers).status_code == 401
    named = headers == [("X-User", "root")]
    assert here.client.get("/api/v1/runs", headers=headers).status_code == (200 if named else 401)
    assert here.client.delete("/api/v1/runs/day", headers=headers).status_code == (403 if named else 401)


def test_a_forged_header_does_not_raise_the_roles_of_a_token(start: Start, tokens: ReaderTokens, runs: Path) -> None:
    hub = start(TrustedProxy(header="X-User", addresses=frozenset(["10.0.0.5"]), roles={"*": frozenset(ROLES)}))
    forged = {
        **token_of(tokens, "anna"),
        "X-User": "root",
        "X-Roles": "delete",
        "Stepscope-Roles": "delete",
        "X-HTTP-Method-Override": "DELETE",
        "Sec-Fetch-Site": "same-origin",
    }
    assert changes(hub, forged) == {each: [403] * len(ALLOWED[each]) for each in ROLES}
    assert label(hub, {**forged, "Authorization": f"bearer {READER}"}) == 200
    for name in ("tokens.json", "../tokens.json", "%2e%2e%2ftokens.json"):
        assert post(hub, f"{name}/labels", {"note": "x"}, forged).status_code in (403, 404)


def test_a_page_elsewhere_cannot_use_the_proxys_session(start: Start, runs: Path) -> None:
    """The browser is signed in at the proxy, which adds the header to whatever the browser sends."""
    hub = start(TrustedProxy(header="X-User", addresses=frozenset(["127.0.0.1"]), roles={"*": frozenset(ROLES)}))
    for origin in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}, {}):
        answers = changes(hub, {"X-User": "anna", **origin})
        assert answers == {each: [403] * len(ALLOWED[each]) for each in ROLES}


def test_a_token_for_one_run_changes_no_other(start: Start, tokens: ReaderTokens, runs: Path) -> None:
    headers = token_of(tokens, "anna", *ROLES, scope=run_scope("night"))
    hub = start()
    assert label(hub, headers, "day") == 403
    assert hub.client.delete("/api/v1/runs/day", headers=headers).status_code == 403
    assert label(hub, headers) == 200
    assert (runs / "day").exists()


def test_a_session_has_the_roles_of_its_token_and_no_more(start: Start, tokens: ReaderTokens) -> None:
    token = token_of(tokens, "anna", "label")["Authorization"].removeprefix("Bearer ")
    hub, here = start(), {"Sec-Fetch-Site": "same-origin"}
    assert hub.client.post("/api/v1/session", json={"token": token}).status_code == 200
    assert label(hub, here) == 200
    assert hub.client.delete("/api/v1/runs/day", headers=here).status_code == 403
    tokens.revoke("anna")
    token_of(tokens, "anna", *ROLES)
    assert label(hub, here) == 401
    assert hub.client.delete("/api/v1/runs/day", headers=here).status_code == 401


def test_unknown_roles_in_the_file_of_tokens_grant_nothing(start: Start, tokens: ReaderTokens, tmp_path: Path) -> None:
    headers = token_of(tokens, "anna", "label")
    file = tmp_path / "tokens.json"
    document = json.loads(file.read_bytes())
    document["tokens"][0]["roles"] = ["admin", "*", "view", "capture"]
    file.write_text(json.dumps(document))
    refused = {each: [403] * len(ALLOWED[each]) for each in ROLES}
    assert changes(start(), headers) == {**refused, "capture": [409]}


def test_readers_with_a_name_sign_with_it(start: Start, tokens: ReaderTokens, runs: Path) -> None:
    hub = start()
    for headers, by in ((token_of(tokens, "anna", "alerts"), "anna"), ({"Authorization": f"Bearer {READER}"}, "ben")):
        answer = post(hub, "night/incidents/1/acknowledge", {"by": "ben"}, headers)
        assert answer.json()["by"] == by
        assert post(hub, "night/silences", {"seconds": 60, "by": "ben"}, headers).json()["by"] == by
    desk = RequestDesk(runs / "night", {"HOME": str(runs)})
    assert [each.by for each in desk.acknowledgments()] == ["anna", "ben"]


def test_every_change_has_a_line_with_who(start: Start, tokens: ReaderTokens, audit: AuditLog) -> None:
    proxy = TrustedProxy(header="X-User", addresses=frozenset(["127.0.0.1"]), roles={"*": frozenset(["delete"])})
    hub, anna = start(proxy), token_of(tokens, "anna", "label")
    page = {"X-User": "carl", "Sec-Fetch-Site": "same-origin"}
    for headers in (anna, anna, anna):
        assert label(hub, headers) == 200
    assert hub.client.delete("/api/v1/runs/night", headers=anna).status_code == 403
    assert hub.client.delete("/api/v1/runs/day", headers=page).status_code == 200
    audit.close()
    fields = ("event", "via", "who", "method", "route", "run", "status")
    lines = [tuple(line[name] for name in fields) for line in read_audit(audit.path)]
    labels, run = "/api/v1/runs/{run}/labels", "/api/v1/runs/{run}"
    assert lines == [
        *[("changed", "named token", "anna", "POST", labels, "night", 200)] * 3,
        ("refused", "named token", "anna", "DELETE", run, "night", 403),
        ("changed", "proxy", "carl", "DELETE", run, "day", 200),
    ]


def test_changes_without_end_do_not_fill_the_log(audit: AuditLog) -> None:
    for number in range(CHANGES + 500):
        audit.note("changed", via="named token", who="anna", method="POST", route="/x", run=str(number), status=200)
    audit.close()
    lines = list(read_audit(audit.path))
    assert len(lines) < CHANGES + 200
    assert sum(line.get("count", 1) for line in lines) == CHANGES + 500


def test_each_reader_sees_whose_runs_there_are(start: Start, tokens: ReaderTokens) -> None:
    hub = start()
    anna = token_of(tokens, "anna")
    answer = hub.client.get("/api/v1/runs", headers=anna).json()
    assert answer["me"] == "anna"
    assert {row["id"]: row["user"] for row in answer["runs"]} == USERS
    mine = hub.client.get("/api/v1/runs?user=anna", headers=anna).json()
    assert ([row["id"] for row in mine["runs"]], mine["total"]) == (["night"], 1)
    assert hub.client.get("/api/v1/runs?user=nobody", headers=anna).json()["runs"] == []
    only_day = token_of(tokens, "carl", scope=run_scope("day"))
    assert hub.client.get("/api/v1/runs?user=anna", headers=only_day).json()["runs"] == []


def test_roles_are_read_from_words() -> None:
    assert checked_roles("view") == frozenset()
    assert checked_roles("view, delete,label") == {"delete", "label"}
    with pytest.raises(UsageError, match=r"no role 'admin'; the roles are view, label, alerts, capture, delete"):
        checked_roles("label,admin")
