"""The shape of the package: whole ideas in few files, few files in a folder, and no import circles."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from module_syntax import parsed, statements

SOURCE = Path("src/stepscope")
SMALL_LINES = 80
SMALL_AT_MOST = 0.1
SINGLE_IMPORTERS_AT_MOST = 0.12
"""Of all modules.  Both keep ideas whole however large the package gets."""
FOLDER_AT_MOST = 17
"""About fifteen can be taken in; two more are not yet a reason to split."""
LINES_AT_MOST = 1000
FACES = ("__init__.py", "__main__.py")
"""What stands for a package or a process: it may import from everywhere below it."""


class Shape:
    def __init__(self, root: Path) -> None:
        self.files = {self._name(root, path): path for path in sorted((root / SOURCE).rglob("*.py"))}
        self.modules = {name: path for name, path in self.files.items() if path.name not in FACES}
        self.imports = {name: self._imports(name) for name in self.files}

    @staticmethod
    def _name(root: Path, path: Path) -> str:
        return ".".join(path.relative_to(root / "src").with_suffix("").parts).removesuffix(".__init__")

    def _imports(self, name: str) -> set[str]:
        """Also those inside functions and for types only."""
        found: set[str] = set()
        for node in statements(parsed(self.files[name])):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
            elif isinstance(node, ast.Import):
                found |= {each.name for each in node.names}
        return (found & set(self.files)) - {name}


@pytest.fixture(scope="module")
def shape(root: Path) -> Shape:
    return Shape(root)


def test_modules_hold_whole_ideas(shape: Shape) -> None:
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, targets in shape.imports.items():
        for target in targets:
            importers[target].add(name)
    alone = [
        name
        for name in shape.modules
        if len(importers[name]) == 1 and next(iter(importers[name])).rpartition(".")[0] == name.rpartition(".")[0]
    ]
    small = [name for name, path in shape.modules.items() if len(path.read_text().splitlines()) < SMALL_LINES]
    assert len(small) <= SMALL_AT_MOST * len(shape.modules), small
    assert len(alone) <= SINGLE_IMPORTERS_AT_MOST * len(shape.modules), alone


def test_files_and_folders_can_be_taken_in(shape: Shape) -> None:
    folders = Counter(path.parent for path in shape.modules.values())
    assert {folder.name: count for folder, count in folders.items() if count > FOLDER_AT_MOST} == {}
    lines = {name: len(path.read_text().splitlines()) for name, path in shape.files.items()}
    assert {name: count for name, count in lines.items() if count > LINES_AT_MOST} == {}


def test_no_import_circles(shape: Shape) -> None:
    """Imports for types count: what needs a type of another module belongs above it."""
    graph = {name: shape.imports[name] & set(shape.modules) for name in shape.modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
