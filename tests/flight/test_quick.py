"""Reading entries off the bytes of a pickle must give what unpickling gives, or nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from fakes.dumps import Call, FlightJob, as_version, frames_at, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import DumpError
from stepscope.flight.decode import decode_dump, load_plain, quick_dump
from stepscope.flight.dump import Dump


def slow(data: bytes) -> Dump | None:
    try:
        return decode_dump(load_plain(data), source="", rank=3)
    except DumpError:
        return None


def document(backend: str = "nccl", count: int = 400) -> dict[str, Any]:
    job = FlightJob(2, backend=backend)
    job.add_group("7", "mesh_dp", [0, 1])
    program = steps(count) + [Call(group="7", op="broadcast", site=frames_at(9, deep=9))] * 3
    job.run({0: program, 1: program}, until={1: 3 * count - 2})
    return job.document(0)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_same_as_unpickling(backend: str) -> None:
    """More entries than fit one part of a pickled list, two groups, waiting ones at the end."""
    data = pickle.dumps(document(backend), protocol=2)
    quick = quick_dump(data, source="", rank=3)
    assert quick is not None
    assert quick == slow(data)


@pytest.mark.parametrize("version", ["2.3", "2.9"])
def test_older_versions(version: str) -> None:
    data = pickle.dumps(as_version(document(count=40), version), protocol=2)
    assert quick_dump(data, source="", rank=3) == slow(data) is not None


def test_durations_are_numbers_too() -> None:
    quick = document(count=40)
    for number, entry in enumerate(quick["entries"]):
        unread_fields = {
            key: entry.pop(key) for key in ("input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "state")
        }
        later = {
            key: entry.pop(key) for key in list(entry) if key.startswith(("time_disc", "retired", "timeout", "is_p2p"))
        }
        entry.update({"duration_ms": number / 7, **unread_fields, **later})
    data = pickle.dumps(quick, protocol=2)
    assert quick_dump(data, source="", rank=3) == slow(data) is not None


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
def test_other_pickles_are_left_to_the_unpickler(protocol: int) -> None:
    assert quick_dump(pickle.dumps(document(count=5), protocol=protocol), source="", rank=3) is None


def test_without_frames() -> None:
    quick = document(count=40)
    for entry in quick["entries"]:
        del entry["frames"]
    data = pickle.dumps(quick, protocol=2)
    assert quick_dump(data, source="", rank=3) == slow(data) is not None


WHOLE = pickle.dumps(document(count=6), protocol=2)


@settings(max_examples=examples(300))
@given(st.data())
def test_damage_is_never_read_as_something_else(data: st.DataObject) -> None:
    damaged = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        if data.draw(st.booleans()):
            damaged[at] = data.draw(st.integers(0, 255))
        else:
            del damaged[at : at + data.draw(st.integers(1, 30))]
    quick = quick_dump(bytes(damaged), source="", rank=3)
    assert quick is None or quick == slow(bytes(damaged))


def test_real_dumps(shared_data: Path) -> None:
    quickly = 0
    for path in sorted((shared_data / "flight").rglob("*")):
        if path.is_file() and (data := path.read_bytes())[:1] == b"\x80":
            quick = quick_dump(data, source="", rank=3)
            assert quick is None or quick == slow(data), path
            quickly += quick is not None
    assert quickly > 40
