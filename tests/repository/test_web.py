"""The page keeps the rules of CONTRIBUTING.md: small files, no HTML from strings, nothing from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

MAX_LINES = 350
FORBIDDEN = {
    "HTML from a string": r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|DOMParser",
    "code from a string": r"\beval\(|new Function\(|javascript:",
    "an address of elsewhere": r"https?://(?!127\.0\.0\.1|localhost|ui\.perfetto\.dev|www\.w3\.org/(?:2000/svg|1999/xhtml))[a-z0-9.-]+",
    "any type": r"(?::|as|<) ?any\b",
}


@pytest.fixture(scope="module")
def sources(root: Path) -> list[Path]:
    found = sorted((root / "web/src").rglob("*.ts*"))
    assert found
    return found


def test_files_are_small_and_say_what_they_are(sources: list[Path]) -> None:
    assert [path.name for path in sources if len(path.read_text().splitlines()) > MAX_LINES] == []
    assert [path.name for path in sources if not path.read_text().startswith("/**")] == []
    assert [path.name for path in sources if not re.fullmatch(r"[a-z0-9-]+\.tsx?", path.name)] == []


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_forbidden(sources: list[Path], what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    assert [(path.name, match[0]) for path in sources for match in pattern.finditer(path.read_text())] == []


def test_colors_stand_in_one_place(root: Path) -> None:
    """And in both themes."""
    sheets = [path for path in (root / "web/src").rglob("*.css") if path.name != "tokens.css"]
    assert [path.name for path in sheets if re.search(r"#[0-9a-fA-F]{3,8}\b|\brgba?\(", path.read_text())] == []
    tokens = (root / "web/src/styles/tokens.css").read_text()
    light, _, dark = tokens.partition(':root[data-theme="dark"]')
    named = set(re.findall(r"(--[\w-]+):", dark))
    assert named
    assert named == set(re.findall(r"(--[\w-]+):", light.partition('[data-theme="light"]')[2]))


def test_versions_are_exact_and_no_registry_is_named(root: Path) -> None:
    package = json.loads((root / "web/package.json").read_text())
    versions = {**package["dependencies"], **package["devDependencies"], **package["overrides"]}
    assert [name for name, version in versions.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []
    lock = (root / "web/package-lock.json").read_text()
    assert "resolved" not in lock


def test_the_built_page_has_the_license_of_each_package_inside(root: Path) -> None:
    lock = json.loads((root / "web/package-lock.json").read_text())["packages"]
    inside = {name for name in lock[""]["dependencies"] if name != "vite"}
    waiting = list(inside)
    while waiting:
        needed = lock[f"node_modules/{waiting.pop()}"].get("dependencies", {}).keys() - inside
        inside |= needed
        waiting += needed
    notices = (root / "web/license-notices.js").read_text()
    assert set(re.findall(r'"([^":]+)"', notices.partition("BUNDLED = [")[2].partition("]")[0])) == inside
    built = next((root / "src/stepscope/page/static/assets").glob("*.js"), None)
    if built is not None:  # without Node.js there is none
        assert built.read_text().count("Permission is hereby granted") == len(inside)
