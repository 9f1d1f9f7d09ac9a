"""The page has words for every kind of finding and of event that there is, and for none that there is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

from module_syntax import parsed

from stepscope.records.hang import HangKind

SOURCES = Path("src/stepscope")


def keys_of(page: str, table: str) -> set[str]:
    """Those of ``export const table … = { … };`` in a page of TypeScript."""
    body = page.partition(f"export const {table}")[2].partition("= {\n")[2].partition("\n};")[0]
    return set(re.findall(r"^  \"?([\w-]+)\"?: \{", body, flags=re.MULTILINE))


def constants(root: Path, folder: str) -> set[str]:
    """Words of the sources that look like a kind."""
    found = set()
    for path in (root / SOURCES / folder).rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"[a-z0-9_]+", node.value)
            ):
                found.add(node.value)
    return found


def events_of(root: Path) -> set[str]:
    """What is written: ``….event("name", …)``, news of the sender, and the notes of the store."""
    found = set()
    for folder in ("agent", "hub", "store", "cli", "records"):
        for path in (root / SOURCES / folder).rglob("*.py"):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                    first = node.args[0]
                    if node.func.attr == "append" and "news" in ast.unparse(node.func.value):
                        first = first.elts[0] if isinstance(first, ast.Tuple) else first
                    elif node.func.attr != "event":
                        continue
                    if isinstance(first, ast.Constant) and isinstance(first.value, str):
                        found.add(first.value)
                if isinstance(node, ast.Dict):
                    pairs = zip(node.keys, node.values, strict=True)
                    found |= {
                        value.value
                        for key, value in pairs
                        if isinstance(key, ast.Constant)
                        and key.value == "event"
                        and isinstance(value, ast.Constant)
                        and isinstance(value.value, str)
                    }
    return found - {"VARCHAR"}  # a column of a table


def test_every_kind_of_finding_has_a_name_and_a_meaning(root: Path) -> None:
    named = keys_of((root / "web/src/words/kinds.ts").read_text(), "KINDS")
    families = (root / "docs/diagnosis.md").read_text().partition("| family |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`([a-z0-9_]+)`", families))
    assert named == documented
    assert set(get_args(HangKind)) <= named
    assert named - set(get_args(HangKind)) <= constants(root, "diagnosis")
    raised = set(re.findall(r'kind="([a-z0-9_]+)"', sources(root, "diagnosis")))
    assert raised - {"stable"} <= named


def sources(root: Path, folder: str) -> str:
    return "\n".join(path.read_text() for path in sorted((root / SOURCES / folder).rglob("*.py")))


def test_every_kind_of_event_has_a_sentence(root: Path) -> None:
    written = events_of(root)
    assert {"rank_start", "hub_lost", "node_lost", "hang", "note"} <= written
    assert keys_of((root / "web/src/words/events.ts").read_text(), "EVENTS") == written
