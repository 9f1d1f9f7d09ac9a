"""Entry point of the command ``stepscope``: loads the package next to this file, whatever else has that name.

A user's own ``stepscope.py`` on PYTHONPATH comes before installed packages.  This module has another name, so that it
is found, and then it does not search.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    package = Path(__file__).with_name("stepscope")
    spec = importlib.util.spec_from_file_location(
        "stepscope", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"Stepscope is not in {package.parent}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["stepscope"] = module
    spec.loader.exec_module(module)
    importlib.import_module("stepscope.cli.main").main()
