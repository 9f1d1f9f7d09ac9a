"""What each kind of token may ask, resource by resource, with paths that try to get around it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster

from stepscope.hub.api.auth import ALL, METRICS, Readers, ReaderTokens, run_scope
from stepscope.hub.api.stream import Streams
from stepscope.hub.app import make_app, resources_of
from stepscope.hub.runs import Runs
from tests.hub.run_parts import READER, Hub, record

RESOURCES = resources_of(Streams(), str, ingest=False, changes=True)
OPEN = {"/healthz"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roles") / "runs"
    record(folder, "own", Cluster(ranks=2, steps=12).run())
    shutil.copytree(folder / "own", folder / "other")
    shutil.copytree(folder / "own", folder / "own-2")
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReaderTokens, dict[str, str]]:
    known = ReaderTokens(tmp_path_factory.mktemp("tokens") / "tokens.json")
    scopes = {"all": ALL, "metrics": METRICS, "run": run_scope("own")}
    made = {name: known.create(name, scope, now_s=1e9, seconds=1e10) for name, scope in scopes.items()}
    return known, made


@pytest.fixture(params=[True, False], ids=["changes", "read-only"])
def hub(request: pytest.FixtureRequest, made: Path, tokens: tuple[ReaderTokens, dict[str, str]]) -> Iterator[Hub]:
    def make() -> Any:
        return make_app(Runs.of_folder(made), Readers(READER, named=tokens[0]), changes=request.param)

    hub = Hub(make)
    yield hub
    hub.close()


def filled(path: str, run: str) -> str:
    return re.sub(r"{(\w+)(?::\w+)?}", lambda found: {"run": run, "rank": "0"}.get(found[1], "x"), path)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_named_token_reads_its_scope_and_changes_nothing(
    hub: Hub, made: Path, tokens: tuple[ReaderTokens, dict[str, str]], request: pytest.FixtureRequest
) -> None:
    before = contents(made)
    for resource in RESOURCES:
        if resource.path.endswith("/stream"):
            continue
        for run in ("own", "other"):
            path = filled(resource.path, run)
            for name, token in tokens[1].items():
                body = json.dumps({"name": "mine"}) if resource.method == "POST" else None
                headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
                answer = hub.client.request(resource.method, path, content=body, headers=headers)
                of_run = path == "/api/v1/runs" or path.startswith("/api/v1/runs/own")
                covered = {"all": True, "metrics": path == "/metrics", "run": of_run}[name]
                if path in OPEN:
                    assert answer.status_code == 200
                elif not covered:
                    assert (answer.status_code, name, path) == (403, name, path)
                elif resource.role is not None:
                    assert answer.status_code in (403, 404, 405), (name, path)
                else:
                    assert answer.status_code != 403, (name, path)
    assert contents(made) == before


@pytest.mark.few(10)
@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/runs/own/../other",
        "/api/v1/runs/own%2f..%2fother",
        "/api/v1/runs/own/%2e%2e/other",
        "/api/v1/runs/own-2",
        "/api/v1/runs/other",
        "/api/v1/runs/other/",
        "//api/v1/runs/other",
        "/api/v1//runs/other",
        "/api/v1/runs/own/files/../../other/run.json",
        "/api/v1/runs/own/files/..%2f..%2fother%2frun.json",
        "/api/v1/runs/own/files/%2e%2e/%2e%2e/other/run.json",
        "/api/v1/runs/own;/../other",
        "/api/v1/runs/own%00",
        "/api/v1/runs/OTHER",
        "/api/v1/compare?runs=own,other",
        "/api/v1/sweeps",
        "/metrics",
    ],
)
def test_a_token_for_one_run_gets_no_other_by_any_path(
    hub: Hub, tokens: tuple[ReaderTokens, dict[str, str]], path: str
) -> None:
    answer = hub.get(path, token=tokens[1]["run"])
    assert answer.status in (307, 400, 403, 404, 405)
    assert b"other" not in answer.body
    assert [run["id"] for run in hub.get("/api/v1/runs", token=tokens[1]["run"]).json["runs"]] == ["own"]


def test_a_read_only_hub_changes_nothing_for_its_own_token_either(
    made: Path, hub: Hub, request: pytest.FixtureRequest
) -> None:
    if "read-only" not in request.node.name:
        pytest.skip("tests/hub/api/test_api_changes.py")
    before = contents(made)
    headers = {"Authorization": f"Bearer {READER}", "Content-Type": "application/json"}
    for method, path in (("POST", "labels"), ("DELETE", ""), ("PUT", "labels"), ("PATCH", "")):
        for way in ({}, {"X-HTTP-Method-Override": "DELETE"}):
            url = f"/api/v1/runs/own/{path}".rstrip("/")
            answer = hub.client.request(method, url, content='{"name": "x"}', headers={**headers, **way})
            assert answer.status_code in (404, 405), (method, url)
    assert contents(made) == before
