"""Keeps our errors away from the training script: failsafe hooks, reversible patches, objects that survive a fork.

``failsafe`` wraps each function that torch or the interpreter calls on our behalf.  It is the only place where our own
errors are swallowed: a failing hook must never reach the training script.  The ring's header has their count, so that a
summary can say that something is missing.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import itertools
import os
import signal
import sys
import traceback
from _thread import get_ident
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from stepscope.recorder.variables import OUR_MODULES, variables_of

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec

__all__ = [
    "ImportWatch",
    "Patches",
    "above_standard_streams",
    "failsafe",
    "failures",
    "immortal",
    "on_failure",
    "warn",
]


# -- Failsafe hooks ---------------------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")

CO_VARARGS = 4
"""A function with ``*args``, as in ``inspect``."""
_count = 0
_listener: Callable[[int], None] | None = None


def failures() -> int:
    return _count


def on_failure(listener: Callable[[int], None] | None) -> None:
    """Call ``listener`` with the new count after each failure (the recorder writes it into the ring)."""
    global _listener
    _listener = listener


def failsafe(hook: Callable[P, R]) -> Callable[P, R | None]:
    """Wrap ``hook`` so that its own exceptions become None and are counted.

    Exceptions that are not its own pass: those that are no ``Exception`` (KeyboardInterrupt, SystemExit), and what a
    signal handler of the script raised, which the interpreter happened to run inside the hook.
    """

    @functools.wraps(hook)
    def safe(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            if _is_from_signal(error):
                raise
            _note_failure(hook.__name__)
            return None

    return safe


def _is_from_signal(error: Exception) -> bool:
    """Whether an exception came out of a signal handler that is not ours.

    Everything that a hook calls itself is ours to answer for: our code, and that of torch and of the standard library,
    which is in the traceback, too; even a property of the script, if we were to call one, because the script did not.
    A signal handler is a function that nobody called: one that got a signal number and the frame that was interrupted,
    wherever it is defined, or that is installed as a handler now.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if not _is_ours(frame) and (_got_signal(frame) or _is_handler(frame.f_code)):
            return True
        trace = trace.tb_next
    return False


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return type(name) is str and name.startswith(OUR_MODULES)


def _got_signal(frame: FrameType) -> bool:
    """Whether two of its arguments, one after the other, are a signal number and a frame."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    rest = code.co_varnames[count] if code.co_flags & CO_VARARGS else ""
    known = dict(variables_of(frame))
    values = [known.get(name) for name in code.co_varnames[: code.co_argcount]]
    more = known.get(rest)
    if type(more) is tuple:
        values += more
    pairs = itertools.pairwise(values)
    return any(type(number) in (int, signal.Signals) and type(found) is FrameType for number, found in pairs)


def _is_handler(code: CodeType) -> bool:
    """Whether code is that of a function which is installed as a handler."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = handler.__func__ if type(handler) is MethodType else handler
        if type(handler) is FunctionType and handler.__code__ is code:
            return True
    return False


def warn(message: str) -> None:
    """Print one line for the user, bypassing ``sys.stderr`` so that it cannot raise in the script.

    Where the script has no standard error, descriptor 2 may be one of its files.
    """
    try:
        if any(type(stream) is TextIOWrapper and stream.fileno() == 2 for stream in (sys.stderr, sys.__stderr__)):
            os.write(2, f"stepscope: {message}\n".encode())
    except (OSError, ValueError):  # closed
        pass


def above_standard_streams(fd: int) -> int:
    """The same file under a number above the standard streams', which the script may have closed."""
    if fd > 2:
        return fd
    above = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return above


def _note_failure(name: str) -> None:
    global _count
    _count += 1
    if _count == 1:
        error: Any = sys.exc_info()[1]
        frame = traceback.extract_tb(error.__traceback__)[-1]
        warn(
            f"a Stepscope hook failed and was ignored: {type(error).__name__}: {error} "
            f"({name}, {os.path.basename(frame.filename)}:{frame.lineno}); the run continues"  # noqa: PTH119
        )
    if _listener is not None:
        _listener(_count)


# -- Objects inherited by a fork --------------------------------------------------------------------------------------
# A forked child has a copy of every object of its parent, but not what some of them depend on: CUDA's context, a
# thread, a server.  Destroying such a copy may use what is not there; destroying one CUDA event in a child of a process
# that uses CUDA aborts the child.  Hence the rule: **every object of the recorder that holds a device object, a lock, a
# socket or a thread is made immortal when it is created.**  Its destructor never runs, in any process, not even when an
# interpreter shuts down; its resources are released with the process.  A child only drops its references
# (``Recorder.forget``).
#
# This is stronger than using ``os.register_at_fork`` to make the child leave objects alone: it also covers children
# forked by native code, children that end with ``sys.exit`` and clear their modules, and the moment before the child's
# callback runs.

T = TypeVar("T")


def immortal(thing: T) -> T:
    """Return the same object, with an additional reference that is never released."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


# -- Patches ----------------------------------------------------------------------------------------------------------
# Attributes replaced on other people's objects, and their previous values.  The last patch is undone first; undoing a
# patch that has been patched over leaves the newer one in place.


_ABSENT = object()


class Patches:
    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Like ``setattr(owner, name, value)``, but remember whether ``owner`` itself had the name before."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._done.append((owner, name, before, value))

    def undo(self, owner: Any = None) -> None:
        """Undo all patches, or those on one owner."""
        keep = []
        for patch in reversed(self._done):
            target, name, before, value = patch
            if owner is not None and target is not owner:
                keep.append(patch)
            elif vars(target).get(name) is value:
                if before is _ABSENT:
                    delattr(target, name)
                else:
                    setattr(target, name, before)
        self._done = keep[::-1]


# -- Import callbacks -------------------------------------------------------------------------------------------------
# Report when a module has been imported, without importing it.
#
# A finder at the head of ``sys.meta_path`` knows a few names.  When one of them is requested it lets the other finders
# find it and wraps the loader, so that the callbacks run after the module's code.  A request is not an import:
# ``importlib.util.find_spec("torch")`` only asks whether there is a torch, and a module whose code fails may be
# imported again.  So a name is forgotten only after its code has run to the end.
#
# Frameworks import torch while their own modules are being imported, and most callbacks are registered when torch is
# there.  ``expect`` announces such a name earlier: a callback that is registered while the module's code runs then
# waits for its end.

Callback = Callable[[ModuleType], object]


class ImportWatch:
    """A finder of ``sys.meta_path``; not derived from ``importlib.abc``, which takes a rank 15 ms to load."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {}
        self._searching: set[tuple[int, str]] = set()
        """Threads that are inside ``find_spec``, and the name: another finder there may ask all finders again."""
        self._running: set[str] = set()
        """Modules whose code runs now, inside our loader."""
        self._incomplete: dict[str, list[Callback]] = {}
        """Callbacks for modules whose code was already running, inside a loader that is not ours."""

    def expect(self, *names: str) -> None:
        """Notice the end of these imports, for callbacks that will be registered later."""
        for name in names:
            if name not in sys.modules:
                self._callbacks.setdefault(name, [])
        self._attach()

    def when_imported(self, name: str, callback: Callback) -> None:
        """Call back once; immediately if the module is already there."""
        module = sys.modules.get(name)
        if module is None or name in self._running:
            self._callbacks.setdefault(name, []).append(callback)
            self._attach()
        elif _is_complete(module):
            callback(module)
        else:
            self._incomplete.setdefault(name, []).append(callback)
            self._attach()

    def remove(self) -> None:
        self._callbacks.clear()
        self._incomplete.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _attach(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._incomplete:
            self._call_completed()
        search = (get_ident(), fullname)
        if fullname not in self._callbacks or search in self._searching:
            return None
        self._searching.add(search)
        try:
            spec = self._found_by_others(fullname, path, target)
        finally:
            self._searching.discard(search)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = cast("Loader", _LoaderThenCall(spec.loader, self))
        return spec

    def _found_by_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find: Any = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def begins(self, name: str) -> None:
        self._running.add(name)

    def ends(self, name: str, module: ModuleType | None) -> None:
        """Call back with the module that importers get; None: its code failed, and it may be imported again."""
        self._running.discard(name)
        if module is not None:
            for callback in self._callbacks.pop(name, ()):
                _call_back(callback, sys.modules.get(name, module))

    def _call_completed(self) -> None:
        for name in list(self._incomplete):
            module = sys.modules.get(name)
            if module is not None and _is_complete(module):
                for callback in self._incomplete.pop(name, ()):
                    _call_back(callback, module)


def _is_complete(module: ModuleType) -> bool:
    """Whether the code of the module has run to its end, as the interpreter itself notes it."""
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)


class _LoaderThenCall:
    """Stands for another loader, whose class and attributes it shows, and reports the end of ``exec_module``."""

    def __init__(self, loader: Any, watch: ImportWatch) -> None:
        self._loader = loader
        self._watch = watch

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        # The module must not see the wrapper: code reads ``__loader__`` and ``__spec__.loader`` for resources.
        module.__loader__ = self._loader
        name = module.__name__
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
            name = module.__spec__.name
        self._watch.begins(name)
        try:
            self._loader.exec_module(module)
        except BaseException:
            self._watch.ends(name, None)
            raise
        self._watch.ends(name, module)


@failsafe
def _call_back(callback: Callback, module: ModuleType) -> None:
    """Run a callback; its errors must not reach the script's import statement."""
    callback(module)
