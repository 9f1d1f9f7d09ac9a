"""Kineto's daemon protocol, as bytes."""

from __future__ import annotations

import struct

import pytest
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepscope.captures.kineto_protocol import (
    LARGEST_DATAGRAM,
    ClientMessage,
    TraceOptions,
    config_text,
    pack_message,
    parse_message,
)

FROM_TORCH = bytes.fromhex(
    "2400000000000000" + b"req".ljust(32, b"\0").hex() + "03000000050000000000000000000000"
    "075b0000d85a0000d75a0000f54b0000ec4b0000"
)
"""What torch 2.13 sent."""


def test_a_request_of_torch_is_read() -> None:
    assert parse_message(FROM_TORCH) == ClientMessage(kind="request", profiler_free=True)


def test_a_request_of_a_busy_profiler_is_read() -> None:
    busy = FROM_TORCH[:40] + b"\x01" + FROM_TORCH[41:]
    assert parse_message(busy) == ClientMessage(kind="request", profiler_free=False)


def test_a_registration_is_read() -> None:
    assert parse_message(pack_message("ctxt", struct.pack("=iiq", 0, 7, 0))) == ClientMessage(kind="registration")


@pytest.mark.parametrize(
    "datagram",
    [
        b"",
        FROM_TORCH[:40],
        FROM_TORCH[:-1],
        FROM_TORCH + b"\0",
        pack_message("data", b"abc"),
        pack_message("ctxt", bytes(15)),
        pack_message("req", struct.pack("=iiq", 3, -1, 0)),
        pack_message("req", struct.pack("=iiq", 3, 1 << 30, 0)),
        pack_message("req", struct.pack("=iiq", 3, 2, 0) + bytes(4)),
        pack_message("req", bytes(LARGEST_DATAGRAM)),
    ],
)
def test_anything_else_is_not_a_message(datagram: bytes) -> None:
    assert parse_message(datagram) is None


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(lambda end: FROM_TORCH[:40] + end)))
@example(FROM_TORCH)
@settings(max_examples=examples(400))
def test_no_datagram_is_an_error(datagram: bytes) -> None:
    message = parse_message(datagram)
    assert message is None or struct.unpack_from("=Q", datagram)[0] == len(datagram) - 40


def test_the_configuration_for_a_time() -> None:
    assert config_text(TraceOptions(duration_ms=300, shapes=True), "/tmp/x.json", start_wall_ms=7) == (
        "ACTIVITIES_LOG_FILE=/tmp/x.json\nPROFILE_START_TIME=7\nACTIVITIES_WARMUP_PERIOD_SECS=1\n"
        "ACTIVITIES_DURATION_MSECS=300\nPROFILE_WITH_STACK=true\nPROFILE_REPORT_INPUT_SHAPES=true\n"
    )


def test_the_configuration_for_steps() -> None:
    assert config_text(TraceOptions(steps=6, stacks=False), "/tmp/x.json", start_wall_ms=7) == (
        "ACTIVITIES_LOG_FILE=/tmp/x.json\nPROFILE_START_ITERATION=0\nPROFILE_START_ITERATION_ROUNDUP=1\n"
        "ACTIVITIES_WARMUP_ITERATIONS=2\nACTIVITIES_ITERATIONS=6\n"
    )


@pytest.mark.parametrize("path", ["/tmp/a\nACTIVITIES_ITERATIONS=9", "/tmp/a ", "/tmp/\0"])
def test_a_path_cannot_add_settings(path: str) -> None:
    with pytest.raises(ValueError, match="configuration of Kineto"):
        config_text(TraceOptions(), path, start_wall_ms=0)
