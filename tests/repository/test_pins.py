"""The pinned environment: exact versions, nothing missing that we depend on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PIN = re.compile(r'[A-Za-z0-9._-]+==[0-9][\w.]*( ; python_version (>=|<) "3\.11")?')


def requirement_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def project_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()


@pytest.mark.parametrize("name", ["test.txt", "lint.txt", "ray.txt", "frameworks.txt", "public.txt", "docs.txt"])
def test_every_requirement_is_pinned(root: Path, name: str) -> None:
    lines = requirement_lines(root / "requirements" / name)
    assert [line for line in lines if not PIN.fullmatch(line)] == []


def test_torch_is_the_one_the_benchmarks_name(root: Path) -> None:
    assert "torch==2.13.0" in requirement_lines(root / "requirements" / "test.txt")


def test_own_dependencies_are_pinned_and_torch_is_not_one(root: Path) -> None:
    pyproject = (root / "pyproject.toml").read_text()
    declared = re.search(r"^dependencies = \[(.*?)\]", pyproject, flags=re.MULTILINE | re.DOTALL)
    assert declared
    ours = {project_name(text) for text in re.findall(r'"([^"]+)"', declared[1])}
    pinned = {project_name(line) for line in requirement_lines(root / "requirements" / "test.txt")}
    assert ours <= pinned
    assert "torch" not in ours


def test_the_pythons_that_are_claimed_are_those_that_are_tried(root: Path) -> None:
    pyproject, makefile = ((root / name).read_text() for name in ("pyproject.toml", "Makefile"))
    claimed = re.findall(r"Programming Language :: Python :: (3\.\d+)", pyproject)
    tried = re.search(r"^PYTHONS \?= (.*)$", makefile, flags=re.MULTILINE)
    assert tried
    assert claimed == tried[1].split()
    assert f'requires-python = ">={claimed[0]}"' in pyproject
