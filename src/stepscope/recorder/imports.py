"""Be told when a module has been imported, without importing it.

A finder at the head of ``sys.meta_path`` that knows a few names.  When one of them is asked for it lets the other
finders find it, wraps the loader so that the callback runs after the module's code, and forgets the name.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from stepscope.recorder.guard import failsafe

__all__ = ["ImportWatch"]

Callback = Callable[[ModuleType], object]


class ImportWatch(MetaPathFinder):
    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {}

    def when_imported(self, name: str, callback: Callback) -> None:
        """Call back once, at once if the module is there already."""
        module = sys.modules.get(name)
        # A module that is still running its code is not there yet, but it is too late to wrap its loader.
        if module is not None:
            callback(module)
            return
        self._callbacks.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        self._callbacks.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callbacks = self._callbacks.pop(fullname, None)
        if callbacks is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThenCall(spec.loader, callbacks)
        return spec


class _LoaderThenCall(Loader):
    """Another loader, and callbacks when it is done; everything else is the other loader's."""

    def __init__(self, loader: Loader, callbacks: Sequence[Callback]) -> None:
        self._loader = loader
        self._callbacks = callbacks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must not see the stand-in: code reads ``__loader__`` and ``__spec__.loader`` for resources.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for callback in self._callbacks:
            _call_back(callback, module)


@failsafe
def _call_back(callback: Callback, module: ModuleType) -> None:
    """Not into the script's import statement, should it fail."""
    callback(module)
