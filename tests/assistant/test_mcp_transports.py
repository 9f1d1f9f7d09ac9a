"""The MCP server as clients reach it, with the package's own client: over stdio, and over HTTP with a token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stepscope.assistant.hub_api import HubApi
from stepscope.assistant.tools import CHANGING_TOOLS, READING_TOOLS
from stepscope.hub.api.auth import Readers, ReaderTokens
from stepscope.hub.runs import Runs
from tests.assistant.conftest import document_of, in_loop
from tests.hub.run_parts import READER, Hub

if TYPE_CHECKING:
    from mcp import Client

CALLS: dict[str, dict[str, object]] = {
    "list_runs": {},
    "get_verdict": {"run": "night"},
    "get_findings": {"run": "night"},
    "list_incidents": {"run": "night"},
    "get_incident": {"run": "night", "number": 1},
    "compare_runs": {"baseline": "hung", "runs": ["night"]},
    "get_hangs": {"run": "hung"},
    "get_stacks": {"run": "night"},
    "get_steps": {"run": "night", "bins": 4},
    "get_goodput": {"run": "night"},
    "get_ranks": {"run": "night"},
    "get_samples": {"run": "night", "bins": 4},
    "get_memory": {"run": "night"},
    "get_events": {"run": "night"},
    "read_log": {"run": "night", "rank": 2, "step": 100},
    "query_sql": {"run": "night", "sql": "select max(step) as last from steps"},
}


async def call_all(client: Client) -> dict[str, Any]:
    """Call every tool that the server offers; the documents by name."""
    names = [tool.name for tool in (await client.list_tools()).tools]
    assert sorted(names) == sorted(CALLS)
    return {name: document_of(await client.call_tool(name, CALLS[name])) for name in names}


def check_all(documents: dict[str, Any]) -> None:
    assert [row["id"] for row in documents["list_runs"]["runs"]] == ["hung", "night"]
    assert documents["get_verdict"]["verdict"]["ranks"] == [2]
    assert documents["query_sql"]["rows"] == [[199]]
    assert documents["get_hangs"]["hangs"][0]["blocked_by"] == [
        {"ranks": [3], "reason": "slept", "where": "train.py:41 in step"}
    ]


def test_every_tool_has_a_call_here() -> None:
    assert sorted(CALLS) == sorted(tool.name for tool in READING_TOOLS)


def test_stdio_calls_every_tool_and_ends_with_the_client(folder: Path) -> None:
    from mcp import Client, StdioServerParameters, stdio_client

    server = StdioServerParameters(
        command=sys.executable, args=["-m", "stepscope", "mcp", str(folder)], env={"PYTHONWARNINGS": ""}
    )

    async def work() -> dict[str, Any]:
        async with Client(stdio_client(server)) as client:
            return await call_all(client)

    check_all(in_loop(work))


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Hub]]:
    from stepscope.assistant.mcp_server import ServerOptions, http_app

    hubs: list[Hub] = []

    def start(*, changes: bool = False, named: ReaderTokens | None = None) -> Hub:
        async def at_once(_seconds: float) -> None:
            """Wrong tokens are slowed down, which tests of the hub see to."""

        def make() -> Any:
            api = HubApi(Runs.of_folder(folder), changes=changes)
            readers = Readers(READER, named=named, sleep=at_once)
            return http_app(api, ServerOptions(changes=changes), readers, hosts=[f"127.0.0.1:{hubs_port[0]}"])

        hubs_port: list[int] = []
        hub = _Started(make, hubs_port)
        hubs.append(hub)
        return hub

    yield start
    for hub in hubs:
        hub.close()


class _Started(Hub):
    """A hub whose application knows the port."""

    def __init__(self, make: Callable[[], Any], port: list[int]) -> None:
        def made() -> Any:
            port.append(self.port)
            return make()

        super().__init__(made)


async def over_http(hub: Hub, token: str | None, work: Callable[[Client], Any], mode: str = "auto") -> Any:
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=30) as http,
        Client(streamable_http_client(f"{hub.url}/mcp", http_client=http), mode=mode) as client,
    ):
        return await work(client)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_http_calls_every_tool_with_the_token(server: Callable[..., Hub], mode: str) -> None:
    hub = server()
    check_all(in_loop(lambda: over_http(hub, READER, call_all, mode)))


def _post(hub: Hub, **headers: str) -> tuple[int, str]:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    named = {"Accept": "application/json, text/event-stream", **{k.replace("_", "-"): v for k, v in headers.items()}}
    response = hub.client.post("/mcp", json=body, headers=named)
    return response.status_code, response.text


def test_http_refuses_other_tokens_hosts_and_origins(server: Callable[..., Hub]) -> None:
    hub = server()
    own = f"Bearer {READER}"
    assert _post(hub)[0] == 401
    assert _post(hub, Authorization="Bearer wrong")[0] == 401
    assert _post(hub, Authorization=own)[0] == 200
    assert _post(hub, Authorization=own, Origin=hub.url)[0] == 200
    for version in ({}, {"MCP_Protocol_Version": "2026-07-28"}):  # both ways through the package
        assert _post(hub, Authorization=own, Host="evil.example", **version) == (421, "Invalid Host header")
        assert _post(hub, Authorization=own, Origin="http://evil.example", **version) == (403, "Invalid Origin header")
    assert _post(hub, Authorization=own, Content_Type="text/plain")[0] == 400
    huge = hub.client.post("/mcp", content=b"x" * (300 << 10), headers={"Authorization": own})
    assert huge.status_code == 413
    assert [hub.get("/mcp", method=method).status for method in ("GET", "DELETE")] == [405, 405]
    assert [hub.get(path).status for path in ("/", "/healthz", "/api/v1/runs", "/mcp/../api")] == [404] * 4


def test_a_named_token_reads_but_does_not_change(server: Callable[..., Hub], tmp_path: Path) -> None:
    named = ReaderTokens(tmp_path / "tokens.json")
    tokens = {
        scope: named.create(f"t{at}", scope, now_s=0, seconds=1e12)
        for at, scope in enumerate(("all runs", "the run night"))
    }
    hub = server(changes=True, named=named)

    async def work(client: Client) -> tuple[int, Any]:
        count = len((await client.list_tools()).tools)
        return count, await client.call_tool("label_run", {"run": "night", "note": "x"})

    count, result = in_loop(lambda: over_http(hub, tokens["all runs"], work))
    assert count == len(READING_TOOLS) + len(CHANGING_TOOLS)
    assert (result.is_error, result.content[0].text) == (
        True,
        "you need the role label for this, or the server's own token",
    )
    status, text = _post(hub, Authorization=f"Bearer {tokens['the run night']}")
    assert (status, "this token is for the run night only" in text) == (403, True)
