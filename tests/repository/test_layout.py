"""The repository keeps the promises its own pages make: paths, targets, versions, sizes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import stepscope

SOURCE = Path("src/stepscope")
PAGES = (
    *("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "bench/README.md", "examples/README.md"),
    *("docs/recipes.md", "docs/releases.md"),
)
PACKAGES = (
    *(
        "agent",
        "cli",
        "diagnosis",
        "flight",
        "hub",
        "integrations",
        "notebook",
        "page",
        "records",
        "recorder",
        "reports",
        "ring",
    ),
    *("records", "recorder", "reports", "ring", "store", "terminal", "traces"),
)
TOP_FOLDERS = (".ci", "bench", "docs", "examples", "requirements", "src", "tests", "web")


def named_paths(page: str) -> set[str]:
    """Everything in single backticks that looks like a path of this repository.

    A path has a slash and begins with a folder or a package of ours, or ends like a source file.  Paths inside a run
    (``summary.json``, ``runs/NAME/logs/``) do neither.
    """
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    found = set()
    for token in re.findall(r"(?<!`)`([\w./-]+)`(?!`)", prose):
        first = token.split("/")[0]
        in_a_folder = "/" in token and first in (*TOP_FOLDERS, *PACKAGES)
        if in_a_folder or token.endswith((".py", ".toml", ".md")):
            found.add(token)
    return found


def test_named_paths_are_found() -> None:
    page = "See `ring/layout.py`, `bench/`, `pyproject.toml`, `a.b`.\n```\n`src/no.py`\n```\n`summary.json` `runs/x/`"
    assert named_paths(page) == {"ring/layout.py", "bench/", "pyproject.toml"}


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_paths_that_exist(root: Path, page: str) -> None:
    bases = (root, root / SOURCE, (root / page).parent)
    names = named_paths((root / page).read_text())
    assert {name for name in names if not any((base / name).exists() for base in bases)} == set()


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_targets_that_exist(root: Path, page: str) -> None:
    makefile = (root / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    code = re.findall(r"`[^`]+`", (root / page).read_text())
    named = {target for piece in code for target in re.findall(r"\bmake ([a-z-]+)\b", piece)}
    assert named - targets == set()


def test_readme_shows_the_two_first_commands(root: Path) -> None:
    readme = (root / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


def test_every_target_is_explained(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE).group(1).split())  # type: ignore[union-attr]
    assert phony == set(re.findall(r"^([a-z0-9-]+):.*## \S", makefile, flags=re.MULTILINE))


def test_changelog_has_this_version(root: Path) -> None:
    releases = re.findall(r"^## \[(\d.*?)\]", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert releases[0] == stepscope.__version__
    assert 'dynamic = ["version"]' in (root / "pyproject.toml").read_text()
    chart = (root / "deploy/kubernetes/chart/Chart.yaml").read_text()
    assert f'appVersion: "{stepscope.__version__}"' in chart


def test_package_ships_its_types(root: Path) -> None:
    assert (root / SOURCE / "py.typed").is_file()


def test_license_is_whole(root: Path) -> None:
    text = (root / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_ci_script_is_executable_and_parses(root: Path) -> None:
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).returncode == 0


def test_ci_runs_both_sets_of_tests(root: Path) -> None:
    text = (root / ".ci" / "run").read_text()
    assert re.findall(r"^make (test|soak)\b", text, flags=re.MULTILINE) == ["test", "soak"]


def test_property_based_tests_draw_fewer_examples_in_make_test(root: Path) -> None:
    """They ask ``examples`` of tests/support/example_counts.py how many."""
    written = re.compile(r"max_examples=\d\d")
    assert [path.name for path in (root / "tests").rglob("*.py") if written.search(path.read_text())] == []


def test_pre_commit_fetches_nothing(root: Path) -> None:
    text = (root / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (.*)", text) == ["local"]
    assert set(re.findall(r"language: (.*)", text)) == {"system"}
