"""What a release is made of: its notes, its workflow, the same bytes each time; and how the pages say to install it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from committed_files import committed_files

import stepscope

NOTES = ".ci/release_notes.py"
CHANGELOG = """# Changelog

## [Unreleased]

- Later.

## [0.4.0] - 2026-11-18

### Added

- A page ([docs/page.md](docs/page.md#list), [elsewhere](https://example.com), [below](#x)).

## [0.3.0] - 2026-11-17
"""


def notes(folder: Path, root: Path, *arguments: str, version: str = "0.4.0") -> tuple[int, str]:
    (folder / "src/stepscope").mkdir(parents=True, exist_ok=True)
    (folder / "src/stepscope/__init__.py").write_text(f'__version__ = "{version}"\n')
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    command = [sys.executable, str(root / NOTES), "--root", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_notes_are_the_section_of_the_tag(root: Path, tmp_path: Path) -> None:
    text = "### Added\n\n- A page ([docs/page.md](docs/page.md#list), [elsewhere](https://example.com), [below](#x)).\n"
    assert notes(tmp_path, root, "v0.4.0") == (0, text)
    linked = text.replace("(docs/page.md", "(https://host/blob/v0.4.0/docs/page.md")
    assert notes(tmp_path, root, "0.4.0", "--links", "https://host/blob/v0.4.0/") == (0, linked)
    wrong = "v0.3.0 is not the version in src/stepscope/__init__.py (0.4.0)\n"
    assert notes(tmp_path, root, "v0.3.0") == (1, wrong)
    assert notes(tmp_path, root, "v0.3.0", version="0.3.0") == (1, "CHANGELOG.md has no text for 0.3.0\n")


def test_the_version_of_today_has_notes(root: Path) -> None:
    command = [sys.executable, str(root / NOTES), f"v{stepscope.__version__}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("### Added\n")


# ── workflow ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def workflow(root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((root / ".github/workflows/release.yml").read_text())
    return loaded


def test_nothing_is_published_before_it_was_tested_and_tried(workflow: dict[str, Any]) -> None:
    jobs = workflow["jobs"]

    def before(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        needs = [needs] if isinstance(needs, str) else needs
        return set(needs).union(*map(before, needs))

    assert workflow[True]["push"] == {"tags": ["v*"]}
    assert before("publish") == {"tests", "sdist", "wheels", "try"}
    assert before("notes") == {"tests", "sdist", "wheels", "try", "publish"}
    # Only the job that publishes may ask for an identity, and only the one that writes the notes may write.
    assert workflow["permissions"] == {"contents": "read"}
    permissions = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert permissions == {"publish": {"id-token": "write"}, "notes": {"contents": "write"}}
    assert "password" not in json.dumps(jobs["publish"])


def test_the_workflow_runs_what_is_here(root: Path, workflow: dict[str, Any]) -> None:
    commands = "\n".join(step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"])
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), flags=re.MULTILINE))
    named = {word for line in re.findall(r"\bmake ((?:[a-z-]+ ?)+)", commands) for word in line.split()}
    assert named == {"lint", "types", "contracts", "test", "soak", "sdist", "reproducible"}
    assert named <= targets
    scripts = set(re.findall(r"\.ci/\w+\.py", commands))
    assert scripts == {NOTES, ".ci/try_install.py"}
    assert [name for name in scripts if not (root / name).is_file()] == []
    tried = workflow["jobs"]["try"]["strategy"]["matrix"]["python"]
    claimed = re.findall(r"Programming Language :: Python :: (3\.\d+)", (root / "pyproject.toml").read_text())
    assert tried == claimed


# ── what is built ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.soak  # builds both twice
def test_archives_have_the_same_bytes_wherever_they_are_built(root: Path) -> None:
    if not (root / "src/stepscope/page/static/index.html").is_file():
        pytest.skip("the page is not built")
    done = subprocess.run([sys.executable, root / ".ci/reproducible.py"], capture_output=True, text=True, check=False)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["same", "same"], done.stdout + done.stderr
    assert done.returncode == 0


# ── how to install ──────────────────────────────────────────────────────────────────────────────────────────────────

BY_NAME = re.compile(
    r"(?:pip|pipx|uv tool|uv pip|uvx?) (?:install|add|run|--from)\b[^\n`&;|]*?(?<![\w/.+-])stepscope(?![\w/.\[*-])"
)
"""From a package index, where Stepscope is not.  ``stepscope[mcp]`` adds to an installed one."""


def test_no_page_says_to_install_from_a_package_index(root: Path) -> None:
    """Remove this test with the first published release."""
    found = []
    for path in committed_files(root):
        name = str(path.relative_to(root))
        if not name.startswith("tests/"):
            found += [f"{name}: {match[0]}" for match in BY_NAME.finditer(path.read_text(errors="ignore"))]
    assert found == []


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("pip install stepscope", True),
        ("    - pip install -U stepscope torch", True),
        ("pip install 'stepscope'", True),
        ("uv tool install stepscope", True),
        ("pipx install stepscope", True),
        ("pip install 'stepscope[mcp]'", False),
        ("pip install dist/stepscope-0.4.0-py3-none-any.whl", False),
        ("pip install /wheels/stepscope-*.whl", False),
        ("pip install git+https://example.com/owner/stepscope", False),
        ("pip install . && stepscope doctor", False),
    ],
)
def test_what_counts_as_from_an_index(line: str, bad: bool) -> None:
    assert bool(BY_NAME.search(line)) is bad


def test_an_extra_exists_for_each_that_is_named(root: Path) -> None:
    declared = (root / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([a-z-]+) = \[", declared, flags=re.MULTILINE))
    named: set[str] = set()
    for path in [*(root / "docs").rglob("*.md"), *(root / "src").rglob("*.py")]:
        named |= set(re.findall(r"stepscope\[([a-z-]+)\]", path.read_text()))
    assert named
    assert named <= extras
