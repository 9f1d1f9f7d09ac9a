"""Sweeps next to the runs of a hub: a list of them, and the page of each (``compare/sweep.py``).

A sweep is a folder with ``sweep.json`` and ``result.json``: one of ``sweeps/`` next to a served folder, or the folder
that a served ``runs`` is in.  Its files may come from anyone, so every value is checked, and a damaged result is listed
as such.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from stepscope.hub.api.resource import Asked, Resource
from stepscope.hub.api.responses import ApiError
from stepscope.hub.runs import Runs
from stepscope.store.file_io import read_document
from stepscope.store.paths import SWEEP_RESULT, SWEEP_STATE, SWEEPS

__all__ = ["resources"]

MOST_SWEEPS = 100
"""The newest are listed."""
MOST_VARIANTS = 200
RESULT_BYTES = 4 << 20
RUNS_FOLDER = "runs"
DAMAGED = "its result cannot be read"


# -- result.json ------------------------------------------------------------------------------------------------------

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e15)]


class _Settings(msgspec.Struct):
    args: list[str] = []
    env: dict[str, str] = {}
    options: list[str] = []


class _Trial(msgspec.Struct):
    round: int
    run: str
    status: str


class _Variant(msgspec.Struct):
    variant: Name
    status: Annotated[str, msgspec.Meta(max_length=1000)]
    front: Literal["front", "near", "dominated", "none"]
    better: Name | None
    speed: Positive | None
    speed_interval: tuple[Positive, Positive] | None
    step_ms: Positive | None
    memory: Annotated[int, msgspec.Meta(gt=0, lt=1 << 60)] | None
    memory_of: Literal["device", "host"] | None
    settings: _Settings
    trials: list[_Trial]

    def __post_init__(self) -> None:
        figures = (self.speed, self.speed_interval, self.step_ms)
        if any((figure is None) != (self.speed is None) for figure in figures):
            raise ValueError("a speed without its interval")
        if self.front != "none" and (self.speed is None or self.memory is None):
            raise ValueError("on the front without figures")


class _Result(msgspec.Struct):
    schema: Literal[1]
    kind: Literal["sweep"]
    name: Name
    unit: Literal["samples/s", "steps/s"]
    rounds: int
    complete: bool
    confidence: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    front: list[Name]
    variants: Annotated[list[_Variant], msgspec.Meta(max_length=MOST_VARIANTS)]

    def __post_init__(self) -> None:
        on_front = {row.variant for row in self.variants if row.front == "front"}
        if set(self.front) != on_front or len({row.variant for row in self.variants}) < len(self.variants):
            raise ValueError("another front than its variants have")


@dataclass(frozen=True, kw_only=True)
class _Sweep:
    folder: Path
    id: str
    changed_ns: int
    result: _Result | None
    """None: it cannot be read."""


# -- where they are ---------------------------------------------------------------------------------------------------


def _sweeps_of(runs: Runs) -> list[_Sweep]:
    """The sweeps of a hub, the newest first, each once."""
    found: dict[Path, int] = {}
    for folder in runs.folders():
        for place in _places(folder.absolute()):
            with suppress(OSError):
                if (place / SWEEP_STATE).is_file():
                    found[place.resolve()] = (place / SWEEP_RESULT).stat().st_mtime_ns
    newest = sorted(found.items(), key=lambda item: -item[1])[:MOST_SWEEPS]
    return [
        _Sweep(folder=place, id=runs.id_of(place), changed_ns=changed_ns, result=_read(place))
        for place, changed_ns in newest
    ]


def _places(folder: Path) -> Iterator[Path]:
    """Folders that may be sweeps."""
    if folder.name == RUNS_FOLDER:
        yield folder.parent
    with suppress(OSError):
        yield from (place for place in (folder.parent / SWEEPS).iterdir() if not place.is_symlink())


def _read(place: Path) -> _Result | None:
    try:
        return msgspec.json.decode(read_document(place / SWEEP_RESULT, most=RESULT_BYTES), type=_Result)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


# -- answers ----------------------------------------------------------------------------------------------------------


def resources() -> Iterable[Resource]:
    return (
        Resource(
            path="/api/v1/sweeps",
            about="The sweeps next to the served runs, newest first, each with what it found in one sentence.",
            answer=_list,
        ),
        Resource(
            path="/api/v1/sweeps/{sweep}",
            about="A sweep as the page draws it: speed and memory of its variants, the front, and what failed.",
            answer=_one,
            path_parameters={"sweep": "ID of the sweep"},
        ),
    )


async def _list(asked: Asked) -> Mapping[str, Any]:
    return {"sweeps": await asyncio.to_thread(_rows, asked.runs)}


def _rows(runs: Runs) -> list[dict[str, Any]]:
    return [_row(runs, sweep) for sweep in _sweeps_of(runs)]


def _row(runs: Runs, sweep: _Sweep) -> dict[str, Any]:
    about = {"id": sweep.id, "folder": runs.folder_of(sweep.folder), "changed_wall_ns": sweep.changed_ns}
    if sweep.result is None:
        return {**about, "name": sweep.folder.name, "problem": DAMAGED}
    page = _page(sweep.result)
    return {
        **about,
        "name": page["name"],
        "problem": None,
        "title": page["verdict"]["title"],
        "variants": len(sweep.result.variants),
        "failed": len(page["parts"][0]["failed"]),
        "complete": sweep.result.complete,
    }


async def _one(asked: Asked) -> Mapping[str, Any]:
    wanted = asked.request.path_params["sweep"]
    sweeps = await asyncio.to_thread(_sweeps_of, asked.runs)
    sweep = next((one for one in sweeps if one.id == wanted), None)
    if sweep is None:
        raise ApiError(404, "there is no such sweep")
    if sweep.result is None:
        raise ApiError(409, DAMAGED)
    return await asyncio.to_thread(_page, sweep.result, _runs_of(asked.runs, sweep))


def _page(result: _Result, runs: Mapping[str, str] | None = None) -> dict[str, Any]:
    from stepscope.compare.sweep import sweep_page  # only those who ask for sweeps need it

    return sweep_page(msgspec.to_builtins(result), runs)


def _runs_of(runs: Runs, sweep: _Sweep) -> dict[str, str]:
    """By variant: the ID of its last run, if this hub serves the sweep's runs."""
    folder = sweep.folder / RUNS_FOLDER
    served = next((one for one in runs.folders() if one.resolve() == folder), None)
    if served is None or sweep.result is None:
        return {}
    return {
        row.variant: runs.id_of(served / row.trials[-1].run)
        for row in sweep.result.variants
        if row.trials and row.trials[-1].run
    }
