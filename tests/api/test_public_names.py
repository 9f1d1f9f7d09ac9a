"""What is public may not change by accident: names, parameters and columns are recorded in ``public_api.txt``.

After a change on purpose: ``pytest tests/api --update-golden``. docs/python-api.md says what is promised.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stepscope

CLASSES = ("Comparison", "Frame", "Run")


def members(name: str, owner: Any) -> Iterator[str]:
    for attribute, kind in sorted(inspect.get_annotations(owner).items()):
        yield f"{name}.{attribute}: {kind}"
    for attribute, value in sorted(vars(owner).items()):
        if attribute.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"{name}.{attribute}: {inspect.signature(value.fget).return_annotation}"  # type: ignore[arg-type]
        elif inspect.isfunction(value):
            yield f"{name}.{attribute}{inspect.signature(value)}"


def public() -> Iterator[str]:
    for name in dir(stepscope):
        value = getattr(stepscope, name)
        if isinstance(value, ModuleType):
            yield f"stepscope.{name}"
        elif isinstance(value, type):
            yield f"stepscope.{name}" + ("" if name in CLASSES else str(inspect.signature(value)))
            yield from members(f"stepscope.{name}", value)
        elif callable(value):
            yield f"stepscope.{name}{inspect.signature(value)}"
    traces = stepscope.traces
    for name in traces.__all__:
        value = getattr(traces, name)
        yield f"stepscope.traces.{name}" + ("" if isinstance(value, type) else str(inspect.signature(value)))
        if isinstance(value, type) and value is not stepscope.Frame:
            yield from members(f"stepscope.traces.{name}", value)


def columns(run: stepscope.Run) -> Iterator[str]:
    for name in ("steps", "phase_shares", "findings", "layers", "collectives", "metrics", "notes", "samples", "events"):
        yield f"Run.{name}() columns: {' '.join(sorted(getattr(run, name)().columns))}"
    result = stepscope.compare("before", "after")
    for name in ("phases", "ranks"):
        yield f"Comparison.{name}() columns: {' '.join(sorted(getattr(result, name)().columns))}"


def test_names_signatures_and_columns(here: Path, root: Path, golden: Callable[[Path, str], None]) -> None:
    lines = [*public(), *columns(stepscope.open("night"))]
    golden(root / "tests" / "api" / "public_api.txt", "\n".join(lines) + "\n")


def test_the_page_lists_everything(root: Path) -> None:
    text = (root / "docs" / "python-api.md").read_text()
    words = set(re.findall(r"\w+", text))
    for owner in (stepscope.Run, stepscope.Comparison, stepscope.Frame):
        attributes = {name for name in {*vars(owner), *inspect.get_annotations(owner)} if name[0] != "_"} - {"keys"}
        assert attributes - words == set(), owner
    assert {name for name in dir(stepscope) if not name.startswith("_")} - words == set()


def test_a_star_import_brings_only_what_a_training_script_needs(run_python: Callable[..., Any]) -> None:
    """Not ``open``, which would replace Python's own, and nothing that loads numpy or DuckDB."""
    code = (
        "import sys\nfrom stepscope import *\n"
        "assert open is __builtins__.open, open\n"
        "print(sorted({'numpy', 'duckdb', 'stepscope.api', 'stepscope.frame'} & set(sys.modules)))"
    )
    done = run_python("-c", code)
    assert (done.stdout, done.code) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize("name", ["Run", "compare", "open", "traces", "errors"])
def test_each_name_alone(run_python: Callable[..., Any], name: str) -> None:
    done = run_python("-c", f"import sys, stepscope\nstepscope.{name}\nprint('torch' in sys.modules)")
    assert (done.stdout, done.code) == ("False\n", 0), done.stderr


def test_types_are_shipped() -> None:
    assert Path(stepscope.__file__).with_name("py.typed").is_file()
