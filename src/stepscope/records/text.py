"""Text for people: numbers with units, messages that are safe on a terminal, progress, names of runs and files, the
name that was probably meant by a mistyped one, and what the text of an exception means.

Numbers have few digits, a unit and no false precision.  Every sentence and table uses these functions.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

from stepscope.errors import UsageError

__all__ = [
    "EVIDENCE",
    "LAUNCHER_MODULES",
    "TIME_IN_NAME",
    "Progress",
    "bytes_text",
    "checked_name",
    "confidence_text",
    "count_text",
    "cpus_text",
    "default_name",
    "did_you_mean",
    "duration_text",
    "evidence_name",
    "for_two_ranks",
    "hang_name",
    "host_in_name",
    "hours_text",
    "memory_cause",
    "ms_text",
    "named_ranks",
    "nearest",
    "no_progress",
    "norm_text",
    "ns_text",
    "number_text",
    "numbered",
    "percent_text",
    "phase_place",
    "printable",
    "printable_document",
    "rate_text",
    "say",
    "share_text",
    "span_texts",
    "without_colors",
]


# -- Numbers and units ------------------------------------------------------------------------------------------------

_UNITS_NS = (("µs", 1e3), ("ms", 1e6), ("s", 1e9))
_LONG_S = (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))


def ns_text(ns: float | None, *, whole: bool = False) -> str:
    """A duration: ``850 ns``, ``83.0 µs``, ``2.04 ms``, ``950 ms``, ``12.3 s``, ``1 min 15 s``, ``2 h 7 min``, ``3 d``.

    ``whole``: whole seconds, for something that is still growing or long ago.  The page has the same function
    (``web/src/ui/format.ts``), and both are tested with one table of examples.
    """
    if ns is None:
        return "–"
    if whole:
        ns = max(ns, 0.0)
    if ns < 0:
        return f"-{ns_text(-ns)}"
    seconds = math.floor(ns / 1e9 + 0.5)
    if seconds < 60 and whole:
        return f"{seconds} s"
    if ns >= 59.95e9 or whole:
        return _long_text(seconds)
    if ns < 999.5:
        return f"{math.floor(ns + 0.5)} ns" if ns else "0"
    unit, size = next((unit, size) for unit, size in _UNITS_NS if ns < 999.5 * size)
    return f"{_three_digits(ns / size)} {unit}"


def ms_text(ms: float | None) -> str:
    """The same from milliseconds."""
    return ns_text(None if ms is None else ms * 1e6)


def duration_text(seconds: float | None, *, whole: bool = False) -> str:
    """The same from seconds."""
    return ns_text(None if seconds is None else seconds * 1e9, whole=whole)


def _long_text(seconds: int) -> str:
    unit, size, part, smaller = next(units for units in _LONG_S if seconds >= units[1] or units[1] == 60)
    rest = seconds % size // smaller
    return f"{seconds // size} {unit}" + (f" {rest} {part}" if rest else "")


def _three_digits(value: float) -> str:
    """Rounded half up in the same way as on the page; ``round`` and JavaScript's ``toFixed`` differ."""
    places = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{math.floor(value * 10**places + 0.5) / 10**places:.{places}f}"


def bytes_text(count: float | None) -> str:
    """Binary units, as in ``free`` and ``nvidia-smi``: ``512 MiB``, ``1.6 GiB``."""
    if count is None:
        return "–"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def span_texts(first: float, last: float) -> tuple[str, str]:
    """Two sizes in one unit, precise enough to show the difference: ``1,034 MiB`` and ``1,383 MiB``."""
    size, units = max(first, last), ["B", "KiB", "MiB", "GiB", "TiB"]
    power = 0
    while size >= 1000 and power < len(units) - 1:
        size, power = size / 1024, power + 1
    if power and abs(last - first) < 1024**power:
        power -= 1
    digits = 1 if power and abs(last - first) < 100 * 1024**power else 0
    first_text, last_text = (f"{value / 1024**power:,.{digits}f} {units[power]}" for value in (first, last))
    return first_text, last_text


def number_text(number: float) -> str:
    """``0.083``, ``2.04``, ``25.5``, ``1,260``."""
    if number < 0.9995:
        return f"{number:.3f}"
    if number < 9.995:
        return f"{number:.2f}"
    return f"{number:.1f}" if number < 99.95 else f"{number:,.0f}"


def norm_text(value: float | None) -> str:
    """A norm or a ratio of norms, of any size: ``1.24``, ``3.1e-06``, ``NaN``, ``infinite``."""
    if value is None:
        return "–"
    if math.isfinite(value):
        return f"{value:.3g}"
    return "NaN" if math.isnan(value) else "infinite"


def rate_text(per_second: float) -> str:
    return f"{bytes_text(per_second)}/s"


def share_text(share: float | None) -> str:
    """``43%``; below one percent ``<1%``."""
    if share is None:
        return "–"
    if 0 < share < 0.01:
        return "<1%"
    return f"{share:.0%}"


def hours_text(hours: float | None) -> str:
    """GPU hours: ``12.3``, ``1,235``; below a twentieth ``<0.1``.  The page has the same function, as of the next two.

    They are in ``web/src/ui/format.ts`` and tested with one table of examples.
    """
    if hours is None:
        return "–"
    size = abs(hours)
    places = 1 if 0 < size < 99.95 else 0
    text = "<0.1" if 0 < size < 0.05 else f"{_half_up(size, places):,.{places}f}"
    return f"-{text}" if hours < 0 else text


def percent_text(share: float | None) -> str:
    """``3.2%``, ``43%``; below half a tenth of a percent ``<0.1%``."""
    if share is None:
        return "–"
    size = abs(share * 100)
    places = 1 if 0 < size < 9.95 else 0
    text = "<0.1" if 0 < size < 0.05 else f"{_half_up(size, places):.{places}f}"
    return f"-{text}%" if share < 0 else f"{text}%"


def confidence_text(confidence: float | None) -> str:
    """``99.2%``; never rounded up to certainty."""
    if confidence is None:
        return "–"
    return ">99.9%" if confidence > 0.999 else f"{math.floor(confidence * 1000) / 10:.1f}%"


def _half_up(size: float, places: int) -> float:
    power = 10.0**places
    return math.floor(size * power + 0.5) / power


def count_text(count: int, thing: str) -> str:
    """``1 rank``, ``1,024 ranks``, ``2 processes``."""
    ending = "" if count == 1 else "es" if thing.endswith("s") else "s"
    return f"{count:,} {thing}{ending}"


def cpus_text(cpus: float) -> str:
    """``1 CPU``, ``0.5 CPUs``."""
    return f"{cpus:g} {'CPU' if cpus == 1 else 'CPUs'}"


def named_ranks(ranks: Sequence[int]) -> str:
    """``Rank 3``, ``Ranks 1, 2 and 5``; beyond eight, the first few and a count."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    if len(ranks) > 8:
        return f"Ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def phase_place(phase: str) -> str:
    """Where in a step: ``in forward``, ``outside all phases``."""
    return "outside all phases" if phase == "other" else f"in {phase}"


# -- Messages ---------------------------------------------------------------------------------------------------------
# Host names, run names, commands, tracebacks and file errors may come from others.  Everything that a terminal would
# obey or hide is shown as an escape instead: control characters of both sets (C0 and C1), marks that change the writing
# direction, invisible characters, and lone surrogates of characters that could not be encoded.

ALLOWED_CONTROLS = "\n\t"
"""Control characters that a text of several lines may contain."""


_COLORS = re.compile(r"\x1b\[[0-9;:]*m")


def for_two_ranks(text: str) -> str:
    """A sentence about a rank and its peers, for a job in which there is only one other rank."""
    return text.replace("its peers'", "the other rank's").replace("its peers", "the other rank")


def without_colors(text: str) -> str:
    """The text without the sequences that set colors and weights on a terminal."""
    return _COLORS.sub("", text)


def printable(text: str, *, keep: str = "", mark: str = "") -> str:
    """The text with everything unprintable escaped, or replaced by ``mark``, except the characters in ``keep``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else mark or c.encode("unicode_escape").decode() for c in text)


def printable_document(value: Any) -> Any:
    """A JSON document with all its texts and keys made ``printable``; line ends and tabs stay."""
    if isinstance(value, str):
        return printable(value, keep=ALLOWED_CONTROLS)
    if isinstance(value, Mapping):
        return {printable_document(key): printable_document(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [printable_document(inner) for inner in value]
    return value


def say(message: str, *, lines: bool = False) -> None:
    """Print one line from Stepscope to standard error: a line end in the name of a run or a file is escaped.

    ``lines``: a text of several lines.
    """
    print(f"stepscope: {printable(message, keep=ALLOWED_CONTROLS if lines else '')}", file=sys.stderr, flush=True)


# -- Progress ---------------------------------------------------------------------------------------------------------
# How long-running work reports progress.

Progress = Callable[[int, int], None]
"""Called now and then with the amount done and the total; the amount never decreases."""


def no_progress(done: int, total: int) -> None:
    """Ignore progress."""


# -- Names ------------------------------------------------------------------------------------------------------------
# Names of runs, and of files named after a host.

MAX_NAME = 200
EVIDENCE = ".evidence."
TIME_IN_NAME = "%Y%m%d-%H%M%S"
LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
)
"""Modules that start ranks and do not train themselves."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_UNSAFE_HOST = re.compile(r"[^A-Za-z0-9._]+")
_HOST_CHARS = 64


def checked_name(name: str) -> str:
    """The name a user chose; UsageError if it cannot name a folder."""
    if not name or name.startswith(".") or len(name) > MAX_NAME or any(c == "/" or not c.isprintable() for c in name):
        raise UsageError(f"{name!r} is not a valid run name: it must be a plain folder name")
    return name


def default_name(command: Sequence[str], when: str) -> str:
    """The script's stem and the time; enough to find last night's run."""
    script = next((PurePath(word).stem for word in command if word.endswith(".py")), "")
    modules = [after for word, after in itertools.pairwise(command) if word == "-m" and after not in LAUNCHER_MODULES]
    if not script and modules:
        script = modules[0].rpartition(".")[2]
    stem = _UNSAFE.sub("-", script or PurePath(command[0] if command else "run").stem).strip("-.") or "run"
    return f"{stem[:MAX_NAME]}-{when}"


def numbered(wanted: str) -> Iterator[str]:
    """NAME, NAME-2, NAME-3 …: callers take the first free one."""
    yield wanted
    for number in itertools.count(2):
        yield f"{wanted}-{number}"


def host_in_name(host: str) -> str:
    """A host as part of a file name: short, and without the dash that ends it there."""
    return _UNSAFE_HOST.sub("_", host)[:_HOST_CHARS] or "host"


def hang_name(host: str, number: int) -> str:
    """Name of the file of a hang, in ``hangs/``."""
    return f"{host_in_name(host)}-{number}.json"


def evidence_name(host: str, number: int) -> str:
    """Name of the file next to it, with what the host's watchdog knew about the hang."""
    return f"{host_in_name(host)}-{number}{EVIDENCE}json"


# -- Suggestions ------------------------------------------------------------------------------------------------------

ALIKE = 0.65
"""Similarity from which a name is suggested for a mistyped one (``difflib``)."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known name that was probably meant; empty if none is similar."""
    import difflib  # only needed for a mistake

    names = list(known)
    begun = [name for name in names if word.strip("-") and name.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    bare = {name.lstrip("-").lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(word.lstrip("-").lower(), bare, n=1, cutoff=ALIKE)
    return bare[close[0]] if close else ""


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """``; did you mean NAME?`` for the end of a message, or nothing; ``form`` is how the name is shown."""
    name = nearest(word, known)
    return f"; did you mean {form.format(name)}?" if name else ""


# -- Exceptions -------------------------------------------------------------------------------------------------------

DEVICE_MEMORY = ("outofmemoryerror", "out of memory", "cudaerrormemoryallocation", "cublas_status_alloc_failed")
HOST_MEMORY = ("defaultcpuallocator", "cannot allocate memory", "std::bad_alloc")
"""Texts that mean out of memory; the host's are checked first."""


def memory_cause(type_name: str, message: str) -> Literal["oom_host", "oom_cuda"] | None:
    """Which memory an exception says has run out."""
    text = f"{type_name} {message}".lower()
    if type_name == "MemoryError" or any(words in text for words in HOST_MEMORY):
        return "oom_host"
    return "oom_cuda" if any(words in text for words in DEVICE_MEMORY) else None
