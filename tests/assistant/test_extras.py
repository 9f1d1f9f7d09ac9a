"""``stepscope mcp`` and ``stepscope slack`` on the command line: without the extras, wrong options, what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.cli.main import run_command
from stepscope.errors import UsageError

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mcp", "mcp_types", "slack_sdk", "pydantic", "httpx2"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in ("mcp", "slack_sdk") else found(name, package)
"""


def test_the_core_works_without_the_extras(tmp_path: Path) -> None:
    program = WITHOUT + (
        "from stepscope.cli.main import build_parser, run_command\n"
        "from stepscope.errors import UsageError\n"
        "import stepscope.assistant.tools, stepscope.assistant.slack_questions, stepscope.hub.app\n"
        "build_parser()\n"
        "for command in ('mcp', 'slack'):\n"
        "    try:\n"
        "        run_command([command])\n"
        "    except UsageError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == (
        "`stepscope mcp` needs the package mcp; install it with: pip install 'stepscope[mcp]'\n"
        "`stepscope slack` needs the package slack_sdk; install it: pip install 'stepscope[slack]'\n"
    )


def test_skill_file_and_documentation_name_all_tools(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stepscope.assistant.tools import CHANGING_TOOLS, READING_TOOLS

    assert run_command(["mcp", "--skill"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# Stepscope: find out what is wrong with a training run\n")
    page = (root / "docs" / "assistants.md").read_text()
    names = [f"`{tool.name}`" for tool in (*READING_TOOLS, *CHANGING_TOOLS)]
    assert [name for name in names if name not in text or name not in page] == []


def test_the_configuration_for_clients(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["mcp", "--config", str(folder / "night"), "--allow-changes"]) == 0
    server = json.loads(capsys.readouterr().out)["mcpServers"]["stepscope"]
    assert server["args"] == ["mcp", str(folder / "night"), "--allow-changes"]
    assert Path(server["command"]).is_absolute()
    assert run_command(["mcp", "--config", "--all", "--http", "7080"]) == 0
    assert json.loads(capsys.readouterr().out)["mcpServers"]["stepscope"] == {
        "type": "http",
        "url": "http://127.0.0.1:7080/mcp",
        "headers": {"Authorization": "Bearer ${STEPSCOPE_MCP_TOKEN}"},
    }


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["mcp", "--no-tls"], "--token-file, --tls-cert, --tls-key and --no-tls need --http"),
        (["mcp", "x", "--all"], "--all is about all your runs; omit x, or omit --all"),
        (["mcp", "--http", "nowhere"], "--http: must be [HOST:]PORT, not 'nowhere' (see `stepscope mcp --help`)"),
        (["mcp", "--http", "1:70000"], "--http: must be [HOST:]PORT, not '1:70000' (see `stepscope mcp --help`)"),
        (["slack", "--all", "--user", "U1"], "--user needs --allow-changes"),
        (["slack", "--all"], "the environment variable SLACK_APP_TOKEN is not set"),
    ],
)
def test_wrong_options(words: list[str], error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLACK_APP_TOKEN", raising=False)
    with pytest.raises(UsageError) as refused:
        run_command(words)
    assert str(refused.value) == error


def test_a_token_file_must_be_private_and_is_not_shown(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "app.token"
    tokens.write_text("not-a-token-but-secret\n")
    tokens.chmod(0o644)
    words = ["slack", str(folder), "--app-token-file", str(tokens)]
    with pytest.raises(UsageError, match="can be read by others"):
        run_command(words)
    tokens.chmod(0o600)
    with pytest.raises(UsageError) as refused:
        run_command(words)
    assert str(refused.value) == f"the app token in file {tokens} is not one: it must begin with xapp-"
