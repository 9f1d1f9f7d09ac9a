"""Reads the script's variables, attributes and containers without running any code of the script.

**The rules for everything in the recorder that walks objects of the script.**

*What may be called.*  Only C functions that are known not to call back: ``type(x)``, ``gc.get_referents``, ``len`` and
slices of exact built-in types, and descriptors that are fetched from a built-in type or from torch's own class.  Never
``x.name``, ``x == y``, ``len(x)``, ``hash(x)``, ``isinstance(x, …)`` or ``x.__class__`` on an object of unknown type:
each of them may be a function of the script, which may raise, print, wait for a device or change something.  Classes
are compared by identity or looked up by ``id``: a metaclass may define ``__eq__`` and ``__hash__``.  (``isinstance``
reads ``__class__`` if the type does not match; ``issubclass(type(x), C)`` does not.)

*What may be written.*  Nothing.  In particular ``frame.f_locals`` is not read for a function: up to Python 3.12 that
writes the current variables into the dict that ``locals()`` returned to the script earlier.

*How long it may take.*  5 ms in a step and 0.1% of the time (``growth.py`` has the clock).  So nothing here visits all
elements of a container, and nothing calls ``gc.get_objects()`` or ``gc.get_referrers()``: both visit every object of
the process, and 5 million lists take a second.

*What may be kept alive.*  Nothing beyond the call: callers keep ids, names and numbers, or weak references.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from types import CellType, CodeType, FrameType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

__all__ = [
    "CO_OPTIMIZED",
    "OUR_MODULES",
    "SAMPLE",
    "attribute_of",
    "attributes_of",
    "class_name",
    "class_namespace",
    "first_of",
    "is_python_class",
    "items_of",
    "last_of",
    "length_of",
    "module_namespace",
    "sample_of",
    "torch_functions_off",
    "variable_of",
    "variables_of",
]

OUR_MODULES = (f"{__name__.partition('.')[0]}.", "stepscope.")
"""How the names of our modules begin; they are others if the script has a module ``stepscope`` (``inject/``)."""
HEAP_TYPE = 1 << 9
"""Flag of a class that was not compiled into the interpreter or a library."""
CO_OPTIMIZED = 1
"""The code of a function, as in ``inspect``."""
SAMPLE = 16
"""Elements of a large container that are visited, usually: half of them from its beginning, half from its end."""

_class_name = type.__dict__["__name__"].__get__
_bases = type.__dict__["__mro__"].__get__
_class_namespace = type.__dict__["__dict__"].__get__
_flags = type.__dict__["__flags__"].__get__
_module_names: Any = vars(ModuleType)["__dict__"]
_lengths = tuple((kind, kind.__len__) for kind in (list, tuple, dict, set, frozenset, deque))
_length_of_exact = {id(kind): length for kind, length in _lengths}
_sized = tuple(kind for kind, _ in _lengths)


# -- Variables of functions -------------------------------------------------------------------------------------------
# From Python 3.13 on ``f_locals`` of a function is a view, and reading it changes nothing.  Python 3.12 has a function
# in C that reads one variable.  Before that the values are read where the interpreter keeps them.  Their place is fixed
# in a minor version; the pointers around it (code, globals, builtins) are compared with what Python says about the
# frame, and where they differ (a debug build, another implementation) the frame has no variables for us.

_WORD = ctypes.sizeof(ctypes.c_void_p)


def variables_of(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Names and values of the local variables of a frame; those of a module are in its ``f_globals``."""
    code = frame.f_code
    if not code.co_flags & CO_OPTIMIZED:
        return
    if sys.version_info >= (3, 13):
        view = frame.f_locals
        names: Iterator[str] = iter(_names_of(code))
        for name in names:
            try:
                yield name, view[name]
            except KeyError:  # not bound
                continue
    elif sys.version_info >= (3, 12):
        for name in _names_of(code):
            try:
                yield name, _get_variable(frame, name)
            except NameError:
                continue
    else:
        yield from _in_memory(frame, code)


def variable_of(frame: FrameType, name: str) -> Any:
    """The value of one local variable; None if it has none."""
    return next((value for known, value in variables_of(frame) if known == name), None)


def _names_of(code: CodeType) -> tuple[str, ...]:
    cells = tuple([name for name in code.co_cellvars if name not in code.co_varnames])
    return (*code.co_varnames, *cells, *code.co_freevars)


if (3, 12) <= sys.version_info < (3, 13):
    _get_variable = ctypes.pythonapi.PyFrame_GetVar
    _get_variable.argtypes = [ctypes.py_object, ctypes.py_object]
    _get_variable.restype = ctypes.py_object


def _in_memory(frame: FrameType, code: CodeType) -> Iterator[tuple[str, Any]]:
    names, inner = _names_of(code), {*code.co_cellvars, *code.co_freevars}
    if sys.version_info < (3, 11):
        # An argument that an inner function uses has two places there, and only the second one is filled.
        names = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        start = _start_in_3_10(frame, code, len(names))
    else:
        start = _start_in_3_11(frame, code)
    if not start:
        return
    values: Any = (ctypes.py_object * len(names)).from_address(start)
    for at, name in enumerate(names):
        try:
            value: Any = values[at]
            if name in inner and type(value) is CellType:
                value = value.cell_contents
        except ValueError:  # not bound
            continue
        yield name, value


def _start_in_3_10(frame: FrameType, code: CodeType, count: int) -> int:
    """Where the variables are, in the frame itself, right before the stack of values; 0: not found."""
    words = (ctypes.c_size_t * 9).from_address(id(frame))
    back, own, builtins, names, stack = words[3], words[4], words[5], words[6], words[8]
    found = (back, own, builtins, names)
    expected = (id(frame.f_back) if frame.f_back else 0, id(code), id(frame.f_builtins), id(frame.f_globals))
    start = stack - count * _WORD
    inside = id(frame) + object.__sizeof__(frame)
    return start if found == expected and id(frame) < start < inside else 0


def _start_in_3_11(frame: FrameType, code: CodeType) -> int:
    """Where the variables are, in the interpreter's own frame; 0: not found."""
    inner = ctypes.c_size_t.from_address(id(frame) + 3 * _WORD).value
    if not inner or inner % _WORD:
        return 0
    words = (ctypes.c_size_t * 9).from_address(inner)
    found = (words[1], words[2], words[4])
    expected = (id(frame.f_globals), id(frame.f_builtins), id(code))
    return inner + 9 * _WORD if found == expected and words[5] in (0, id(frame)) else 0


# -- Containers and attributes ----------------------------------------------------------------------------------------


def class_name(value: Any, *, itself: bool = False) -> str:
    """The name of an object's class; ``itself``: it is the class."""
    return str(_class_name(value if itself else type(value)))


def class_namespace(cls: type) -> Mapping[str, Any]:
    names: Mapping[str, Any] = _class_namespace(cls)
    return names


def is_python_class(kind: type) -> bool:
    """Whether a class was made by a ``class`` statement or like one: the collector lists what its objects refer to."""
    return bool(_flags(kind) & HEAP_TYPE)


def length_of(value: Any) -> int:
    """The number of elements of a built-in container or of a subclass of one; -1 for anything else."""
    kind = type(value)
    length: Any = _length_of_exact.get(id(kind))
    if length is None:
        if not issubclass(kind, _sized):
            return -1
        length = next(known for base, known in _lengths if issubclass(kind, base))
    return int(length(value))


def items_of(value: Any, most: int = SAMPLE) -> list[tuple[Any, Any]]:
    """Keys and elements of a container, of a large one some from both ends; [] for the rest.  A set has no keys."""
    kind, length = type(value), length_of(value)
    if length <= 0:
        return []
    half = most // 2
    if issubclass(kind, dict):
        items = dict.items(value)
        return list(items) if length <= most else [*islice(items, half), *islice(reversed(items), half)]
    if issubclass(kind, set | frozenset):
        base: Any = set if issubclass(kind, set) else frozenset
        return [(None, element) for element in islice(base.__iter__(value), most)]
    base = next(base for base in (list, tuple, deque) if issubclass(kind, base))
    places = range(length) if length <= most else (*range(half), *range(length - half, length))
    return [(at, base.__getitem__(value, at)) for at in places]


def first_of(value: Any, most: int) -> list[Any]:
    """The first elements of a list or tuple, or values of a dict, or of a subclass of one."""
    kind = type(value)
    if issubclass(kind, dict):
        return list(islice(dict.values(value), most))
    base: Any = list if issubclass(kind, list) else tuple
    return list(base.__getitem__(value, slice(most)))


def sample_of(value: Any) -> list[Any]:
    """The same without keys."""
    return [element for _, element in items_of(value)]


def last_of(container: Any) -> Any:
    """The element that was added last, if the container knows; None if it is empty."""
    if issubclass(type(container), dict):
        return next(reversed(dict.values(container)), None)
    sample = sample_of(container)
    return sample[-1] if sample else None


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes, if it has an ordinary one."""
    if type(value) is type or issubclass(type(value), type):
        return None
    for base in _bases(type(value)):
        found = _class_namespace(base).get("__dict__")
        if found is not None:
            if type(found) is not GetSetDescriptorType:
                return None  # a property of the script
            names = found.__get__(value)
            return names if type(names) is dict else None
    return None


def attribute_of(value: Any, name: str) -> Any:
    """An attribute that is there without a call: in the object's dict or slots, or a plain value of its class.

    None for a property of the script, and for what its ``__getattr__`` would make.
    """
    names = attributes_of(value)
    if names is not None and name in names:
        return names[name]
    for base in _bases(type(value)):
        found = _class_namespace(base).get(name)
        if type(found) is MemberDescriptorType:
            try:
                return found.__get__(value)
            except AttributeError:  # not set
                return None
        if found is not None:
            return found if type(found) in (bool, int, float, str) else None
    return None


def module_namespace(module: Any) -> dict[str, Any] | None:
    """The variables of a module; None for other objects that are in ``sys.modules``."""
    if not issubclass(type(module), ModuleType):
        return None
    names = _module_names.__get__(module)
    return names if type(names) is dict else None


def torch_functions_off() -> AbstractContextManager[object]:
    """While this is on, no ``__torch_function__`` of a subclass or mode of the script sees what we read of tensors."""
    torch: Any = sys.modules.get("torch")
    off = getattr(getattr(torch, "_C", None), "DisableTorchFunction", None)
    return nullcontext() if off is None else off()
