"""Every module of the package, read as syntax: what it exports and what it imports.

Read, not imported: importing the recorder would bring torch in, and ``__main__`` would run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from module_syntax import parsed, statements

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "stepscope"
SCRIPTS = ("demo/", "recorder/inject/")
"""Run, never imported."""
MODULES = sorted(
    name for path in PACKAGE.rglob("*.py") if not (name := path.relative_to(PACKAGE).as_posix()).startswith(SCRIPTS)
)
IN_RANK_PROCESS = ("errors.py", "records/", "ring/", "recorder/")
MAY_IMPORT_TORCH = ("recorder/", "integrations/", "node_check/loads.py")
PURE = ("diagnosis/", "reports/")


def parse(module: str) -> ast.Module:
    return parsed(PACKAGE / module)


def bound_names(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module binds at its top level, also inside ``if``, ``try`` and ``with``."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from bound_names(getattr(node, block, []))


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            if isinstance(node.value, ast.ListComp):
                return []  # made of the names that are there
            return list(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return None


def imported_roots(tree: ast.Module) -> set[str]:
    """Top-level packages imported anywhere in a module, except for type checking only."""
    roots = set()
    for node in statements(tree, for_types=False):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.split(".")[0])
    return roots


def has_only_docstring(tree: ast.Module) -> bool:
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in tree.body)


def wrong_exports(tree: ast.Module, module: str) -> str:
    """What is wrong with its ``__all__``; empty if nothing is."""
    names = exported(tree)
    if names is None:
        return "" if has_only_docstring(tree) or Path(module).name == "__main__.py" else "no __all__"
    lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    private = [name for name in names if name.startswith("_") and not name.startswith("__")]
    unbound = set() if lazy else set(names) - set(bound_names(tree.body))
    if len(names) > len(set(names)) or private or unbound:
        return f"named twice, private or not there: {names}"
    return ""


# All modules in one test each: there are hundreds, and one that fails is named.


def test_all_is_true() -> None:
    wrong = {module: wrong_exports(parse(module), module) for module in MODULES}
    assert {module: why for module, why in wrong.items() if why} == {}


def test_rank_process_loads_only_stdlib_and_torch() -> None:
    found = {name: imported_roots(parse(name)) for name in MODULES if name.startswith(IN_RANK_PROCESS)}
    allowed = {*sys.stdlib_module_names, "stepscope"}
    more = {
        name: roots - allowed - ({"torch"} if name.startswith("recorder/") else set()) for name, roots in found.items()
    }
    assert len(found) > 40
    assert {name: roots for name, roots in more.items() if roots} == {}


def test_torch_stays_out() -> None:
    outside = [name for name in MODULES if not name.startswith(MAY_IMPORT_TORCH)]
    assert len(outside) > 200
    assert [name for name in outside if "torch" in imported_roots(parse(name))] == []


def test_pure_modules_open_nothing() -> None:
    pure = [name for name in MODULES if name.startswith(PURE)]
    assert len(pure) > 30
    for module in pure:
        calls = [node.func for node in ast.walk(parse(module)) if isinstance(node, ast.Call)]
        names = {call.id for call in calls if isinstance(call, ast.Name)}
        assert names & {"open", "print", "input"} == set(), module


def test_public_api_is_true_and_lazy(run_python: Callable[..., Any]) -> None:
    """Importing stepscope is cheap, by count of modules; every public name is then really there."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import stepscope\n"
        "new = sorted(set(sys.modules) - before)\n"
        "missing = [name for name in stepscope.__all__ if not hasattr(stepscope, name)]\n"
        "print((new, missing))\n"
    )
    done = run_python("-c", code)
    assert done.code == 0, done.stderr
    new, missing = ast.literal_eval(done.stdout)
    assert missing == []
    roots = {name.split(".")[0] for name in new}
    assert roots & {"torch", "numpy", "duckdb", "psutil", "pynvml", "asyncio", "argparse", "subprocess"} == set()
    assert len(new) <= 40, new


def test_no_constant_is_defined_twice() -> None:
    """The second definition would change what the first one's readers see: folding modules together did that once."""
    twice: dict[str, set[str]] = {}
    for module in MODULES:
        targets = [
            target
            for node in parse(module).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        names = [target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()]
        twice[module] = {name for name in names if names.count(name) > 1}
    assert {module: names for module, names in twice.items() if names} == {}
