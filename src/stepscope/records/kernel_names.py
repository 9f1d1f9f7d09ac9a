"""Shortens names of kernels and operators to fit a table, keeping them distinct.

    void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, …>(int, …)
    → vectorized_elementwise_kernel<CUDAFunctor_add>

C++ names lose their return type, namespaces, parameters and template arguments, except for the one that says what is
done: the innermost first that is neither a number nor a plain type.  A name that is still too long keeps its beginning
and its end, which contain the numbers that distinguish kernels (tile sizes, layouts).

Lines of Python, as the profiler writes them, become ``train.py:31 in step``.  To fit they lose their folders, then the
function; file name and line always stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["fitted", "short_name", "short_names"]

PLAIN = re.compile(
    r"^(const |unsigned |signed |long |short |volatile )*"
    r"((\([\w:]+\))?-?\d\w*|true|false|float\d?|double|int|long|short|char|bool|void|signed|unsigned|__half|__nv_bfloat16|"
    r"u?int\d+_t|(std::)?size_t|(c10::|at::)?(Half|BFloat16|Float8\w*|complex<\w+>))[\s*&]*$"
)
"""A template argument that says nothing about what the kernel does."""
CONTAINER = re.compile(r"^(\w*Metadata|OpaqueType|Array|TensorInfo)$")
"""Neither do these."""
WRAPPER = re.compile(r"^(gpu_kernel_impl\w*|[AB]UnaryFunctor|BinaryFunctor|ReduceOp|func_wrapper_t)$")
"""The argument one level below says what is done."""
SAYS_NOTHING = ("Kernel", "Kernel2")
"""CUTLASS gives all of its kernels these names."""
ANONYMOUS = re.compile(r"\(anonymous namespace\)::|\{anonymous\}::|<unnamed>::|_GLOBAL__N__\w+::")
RETURNS = re.compile(r"^(void |(std::)?enable_if<[^<>]*>::type )+")
"""Precedes the name of a function."""
CALLED = re.compile(r"^[\w:~ *&]*\w\(.*\)$")
AUTOGRAD = "autograd::engine::evaluate_function: "
BUILT_IN = "<built-in "
"""Python's functions, not C++."""
PYTHON_LINE = re.compile(r"^(?P<file>[^()]+\.py)\((?P<line>\d+)\): (?P<function>.+)$")
PLACE = re.compile(r"^(?P<place>[^:]+\.py:\d+)(?P<function> in .+)?$")
DEEPEST = 8
LONGEST = 4096
"""Only this many characters of a name are considered."""


def short_names(names: Iterable[str], columns: int) -> dict[str, str]:
    """Short names by name; all distinct, and none but a line of code longer than ``columns`` (at least 12)."""
    out: dict[str, str] = {}
    used: set[str] = set()
    met: dict[str, int] = {}
    for name in dict.fromkeys(names):
        short = short_name(name)
        text = fitted(short, columns)
        while text in used:
            number = met[short] = met.get(short, 1) + 1
            # After a line of code, a number in parentheses would look like another line.
            mark = f" #{number}" if PLACE.match(short) else f" ({number})"
            text = fitted(short, columns - len(mark)) + mark
        used.add(text)
        out[name] = text
    return out


def short_name(name: str) -> str:
    """The name without its dispensable parts; names that are not C++ are returned unchanged."""
    text = " ".join(name[:LONGEST].split())
    if text.startswith(BUILT_IN):
        return text
    if line := PYTHON_LINE.match(text):
        inside = "" if line["function"] == "<module>" else f" in {line['function']}"
        return f"{line['file']}:{line['line']}{inside}"
    if text.startswith(AUTOGRAD):
        return f"autograd: {text[len(AUTOGRAD) :]}"
    known = ANONYMOUS.sub("", text)
    if not ("<" in known and ">" in known) and not CALLED.match(known):
        return text
    base, arguments = _parted(RETURNS.sub("", known))
    inner = _telling(arguments, DEEPEST)
    if not inner:
        return base
    return inner if base in SAYS_NOTHING else f"{base}<{inner}>"


def fitted(text: str, columns: int) -> str:
    """The text with its middle cut out if it is too long; of a line of code, file name and line stay."""
    if len(text) <= columns:
        return text
    if place := PLACE.match(text):
        _, folder, name = place["place"].replace("\\", "/").rpartition("/")
        inside = f"…/{name}" if folder else name
        shorter = (f"{inside}{place['function'] or ''}", inside)
        return next((text for text in shorter if len(text) <= columns), name)
    tail = max(columns // 3, 1)
    return f"{text[: columns - 1 - tail]}…{text[len(text) - tail :]}"


def _parted(text: str) -> tuple[str, list[str]]:
    """The bare name and its template arguments."""
    at = min((place for place in (text.find("<"), text.find("(")) if place > 0), default=len(text))
    base = text[:at].strip().rpartition(" ")[2].rpartition("::")[2] or text[:at]
    if text[at : at + 1] != "<":
        return base, []
    arguments, depth, since = [], 0, at + 1
    for place in range(at, len(text)):
        letter = text[place]
        if letter in "<({[":
            depth += 1
        elif letter in ">)}]" and text[place - 1] != "-":
            depth -= 1
        if depth == 0 or (depth == 1 and letter == ","):
            arguments.append(text[since:place].strip())
            since = place + 1
        if depth == 0:
            break
    else:
        # Cut off: the last argument has no end.
        arguments.append(text[since:].strip())
    return base, arguments


def _telling(arguments: list[str], depth: int) -> str:
    for argument in arguments:
        if not argument or PLAIN.match(argument):
            continue
        base, inner = _parted(argument)
        if CONTAINER.match(base):
            continue
        return (_telling(inner, depth - 1) if depth and WRAPPER.match(base) else "") or base
    return ""
