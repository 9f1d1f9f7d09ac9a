"""A real Prometheus (Debian's) that scrapes hubs of the tests, every second.

with prometheus(tmp_path, targets=[f"127.0.0.1:{hub.port}"], token=READER, rules=rules) as server:
    server.until('stepscope_run_step{run="demo"}')
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from waiting import until

__all__ = ["RealPrometheus", "program", "prometheus"]

T = TypeVar("T")


def program(name: str) -> str:
    """``prometheus`` or ``promtool``; the test is skipped without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} (Debian's prometheus) is not installed")
    return found


class RealPrometheus:
    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/"

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; None while the server starts."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}{path}?{query}", timeout=30) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            error.close()
            assert error.code == 503, text  # it listens before it is ready
            return None

    def query(self, promql: str) -> list[Any]:
        """The instant vector; a scalar is one row."""
        found = self.get("query", query=promql)
        return [] if found is None else list(found["result"])

    def firing(self) -> set[str]:
        found = self.get("alerts") or {"alerts": []}
        return {alert["labels"]["alertname"] for alert in found["alerts"] if alert["state"] == "firing"}


@contextmanager
def prometheus(
    folder: Path, config: Mapping[str, Any], *, rules: Mapping[str, Any] | None = None
) -> Iterator[RealPrometheus]:
    """``config``: its configuration, scraped every second; JSON is YAML."""
    command = program("prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    document = {**config, "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}}
    if rules is not None:
        (folder / "rules.yml").write_text(json.dumps(rules))
        document["rule_files"] = ["rules.yml"]
    (folder / "prometheus.yml").write_text(json.dumps(document))
    words: Sequence[str] = [
        command,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
    try:
        yield RealPrometheus(_address(process, log))
    finally:
        process.terminate()
        process.wait(30)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens: the kernel chose the port."""

    def listening() -> re.Match[str] | None:
        assert process.poll() is None, log.read_text()
        return re.search(r"Listening on\W.*?address=(\S+)", log.read_text())

    return until(listening)[1]
