"""Traces that are damaged or odd at random, and what two readers make of them.

The reader in C and the one in Python (``traces/reading``) must agree on any bytes.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import msgspec

from fakes.traces import MadeTrace
from stepscope.errors import TraceError
from stepscope.traces.model.columns import TABLES, Trace, side_columns
from stepscope.traces.reading.kineto import read_kineto
from stepscope.traces.reading.kineto_events import Args, MemoryArgs, Slice
from stepscope.traces.reading.scanned import PURE

__all__ = ["BLOCKS", "Event", "damaged_text", "differences", "fields_of", "full_trace", "odd_document", "parts"]

BLOCKS = (*(6 * [1 << 20]), 4096, 4096, 500, 61)
"""Bytes of a block: pieces end in any place of an event."""
NUMBERS = """
-0 -1 00 01 -01 1.0 -1.5 0.1 1. .5 +1 1e3 1E-3 1e5 1e 1e+ 1e400 -1e400 0.0 -0.0 0e0 0.0005 0.9995 0.000 5.000 5.001
12.3456 0.12345678901234567 123456789012.345 123456789012.34 999999999999999 9999999999999999 123456789012345678
999999999999999999 1234567890123456789 1023 1024 2147483646 2147483647 2147483648 4294967295 9007199254740991
9007199254740993 9223372036854775807 9223372036854775808 -9223372036854775808 18446744073709551615 18446744073709551616
8796093022207.999 8796093022208 8796093022208.5 1669783687384378.123 1669783687384378 2300000000000000
2300000000000001 2305843009213693 2305843009213694 2305843009213693.952 NaN Infinity -Infinity nan 0x10 1_000
340282346638528859811704183484516925440 340282356779733661637539395458142568448 100000000000000000000
"""
WORDS = r"""
null true false tru nulll {} [] [[]] [1,] {"a":1,} "" "7" "007" "0" "-1" "stream_7" "stream_4294967295" "1e5" "\u0031"
"\u00e9" "\ud83d\ude00" "\ud83d" "\uDC00" "\uD7ff" "\n" "\/" "\"" "\\" "\x" "\u12" "fwdbwd" "ac2g" "[memory]"
"thread_name" "kernel" "Kernel" "CONCURRENT_KERNEL" "cpu_op" "Operator" "user_annotation" "python_function"
"cuda_runtime" "gpu_memcpy" "gpu_memset" "cuda_sync" "overhead" "Trace" "conv" "attention" "X" "B" "E" "i" "I" "s" "f"
"M" "C" "b" "?" "XX" "ab" [1,"a",{"b":[null]}] {"name":"loader"} {"name":7} {"Bytes":512,"Addr":-1} {"Bytes":null}
{"device":1,"device":2} {"stream":-0,"correlation":7}
"""
VALUES = [each.encode() for each in (*NUMBERS.split(), *WORDS.split())] + [
    *(f'"{text}"'.encode() for text in ("é", "数据", "a\U0001f600b", "\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff")),
    *(
        b'"' + text + b'"'
        for text in (b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xe6\x95", b"\x80")
    ),
    *(b'"\xff"', b'"\xed\xa0\x80"', b'"a\x00b"', b'"a\nb"', b'"\x7f"', b"\x00", b'"unfinished'),
    *(b'"' + b"x" * size + b'"' for size in (7, 8, 9, 198, 199, 300)),
    *(b"[" * depth + b"]" * depth for depth in (30, 31, 32, 33, 34, 2000)),
    b'{"a":' * 40 + b"1" + b"}" * 40,
]
TOKENS = [
    *VALUES,
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"},", b"},{", b"//", b" \t\r\n"),
    *(b'"ph":"X",', b'"ts":5,', b'"args":{}'),
]
ARGS = [field.encode_name.encode() for kind in (Args, MemoryArgs) for field in msgspec.structs.fields(kind)]
KEYS = [
    *(field.encode_name.encode() for field in msgspec.structs.fields(Slice)),
    b"ph",
    b"id",
    b"",
    b"else",
    b"p\\u0068",
]


def full_trace() -> MadeTrace:
    """One with every kind of event that Kineto writes."""
    made = MadeTrace(header={"deviceProperties": [{"id": 0}]})
    made.events.append({"ph": "M", "name": "thread_name", "pid": 4000, "tid": "17", "args": {"name": "loader"}})
    made.events.append({"ph": "C", "name": "counter", "pid": 4000, "ts": 1, "args": {"x": {"y": [1e-9, None, True]}}})
    made.events.append({"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 1669783687384378.5})
    made.step(1, 0, 1000)
    convolution: dict[str, Any] = {
        "Concrete Inputs": ["", "[1, 1]"],
        "Input Dims": [[1, 3], []],
        "Input type": ["float", ""],
    }
    made.op("aten::conv2d", 1.001, 20.5, **convolution, **{"Sequence number": 3, "Fwd thread id": 0, "External id": 9})
    made.op("aten::mm", 2, 1, tid=17, **{"Concrete Inputs": ["kept for no operator but these"], "external id": 7})
    stack: dict[str, Any] = {"Call stack": "a\\b.py(1): f;\nc", "Module Hierarchy": "Net.layer"}
    made.op('aten::"odd"', 1669783687384378.125, 3, **stack)
    module: dict[str, Any] = {"Python id": 5, "Python parent id": None, "Python module id": 1}
    made.python("nn.Module: Linear_0", 3, 4, **module)
    launch: dict[str, Any] = {
        "blocks per SM": 0.0125,
        "warps per SM": 1e2,
        "est. achieved occupancy %": 33,
        "graph id": 0,
    }
    made.launched("gemm", at=5, start=6, dur=7.25, **launch, **{"registers per thread": 16, "shared memory": 49152})
    made.kernel("elsewhere", 9, 1, stream=2**32 - 1, device=-1)
    made.kernel("beyond", 9, 1, stream=-1, device=4096)
    made.add("gpu_memcpy", "Memcpy HtoD", 10, 1, tid="stream 20", args={"bytes": 4096, "device": 0})
    awaited: dict[str, Any] = {"wait_on_stream": 4294967295, "wait_on_cuda_event_record_corr_id": 12}
    made.add("cuda_sync", "Stream Wait Event", 11, 1, args=awaited)
    group: dict[str, Any] = {
        "Collective name": "allreduce",
        "Process Group Name": "0",
        "Process Group Description": "",
        "Process Group Ranks": "[0, 1]",
    }
    sizes: dict[str, Any] = {"In msg nelems": 8, "Out msg nelems": 8, "Group size": 2, "Seq": 4, "dtype": "Float"}
    made.kernel("ncclDevKernel_AllReduce", 12, 5, **group, **sizes)
    made.memory(13, -512, 1024, 4096, address=140_000_000_000_000)
    made.forward_backward(1, 3, 14)
    made.add(None, "", 15, 0)
    return made


Fields = list[tuple[bytes, bytes]]
Event = tuple[Fields, Fields | None]
"""Keys and values as written; those of ``args`` apart."""


def fields_of(event: dict[str, Any]) -> Event:
    outer = {key: value for key, value in event.items() if key != "args"}
    args = event.get("args")
    return _written(outer), _written(args) if isinstance(args, dict) else None


def _written(values: dict[str, Any]) -> Fields:
    return [(json.dumps(key)[1:-1].encode(), json.dumps(value).encode()) for key, value in values.items()]


def odd_document(random_: random.Random, events: list[Event], odd: tuple[int, ...] = (0, 1, 1, 1, 2, 5)) -> bytes:
    """Some of the events, a few of them (``odd``) with other fields or values, in other orders and spacings."""
    start = random_.randrange(len(events))
    some = events[start : start + random_.randrange(1, 40)]
    changed = {random_.randrange(len(some)) for _ in range(random_.choice(odd))}
    comma, colon = random_.choice(((b",", b":"), (b", ", b": "), (b" ,\n\t", b" : ")))
    texts = []
    for at, event in enumerate(some):
        outer, args = list(event[0]), None if event[1] is None else list(event[1])
        if at in changed:
            for _ in range(random_.choice((1, 1, 2, 4))):
                if args is not None and random_.random() < 0.6:
                    _change(random_, args, ARGS)
                else:
                    _change(random_, outer, KEYS)
        if args is not None:
            outer.append((b"args", _object(args, comma, colon)))
            if at in changed and random_.random() < 0.2:
                random_.shuffle(outer)
        texts.append(_object(outer, comma, colon))
    listed = b"[" + comma.join(texts) + b"]"
    return listed if random_.random() < 0.1 else b'{"schemaVersion":1,"traceEvents":' + listed + b',"traceName":"odd"}'


def _change(random_: random.Random, fields: Fields, keys: list[bytes]) -> None:
    choice, at = random_.random(), random_.randrange(len(fields) + 1)
    if choice < 0.5 and at < len(fields):
        fields[at] = (fields[at][0], random_.choice(VALUES))
    elif choice < 0.75:
        fields.insert(at, (random_.choice(keys), random_.choice(VALUES)))
    elif choice < 0.85 and at < len(fields):
        del fields[at]
    elif choice < 0.9 and at < len(fields):
        fields.insert(random_.randrange(len(fields)), fields[at])
    else:
        random_.shuffle(fields)


def _object(fields: Fields, comma: bytes, colon: bytes) -> bytes:
    return b"{" + comma.join(b'"' + key + b'"' + colon + value for key, value in fields) + b"}"


def damaged_text(random_: random.Random, text: bytes) -> bytes:
    """The text with bytes changed, inserted, left out, repeated, or without its end."""
    out = bytearray(text)
    for _ in range(random_.choice((1, 1, 2, 5))):
        if not out:
            break
        at, choice = random_.randrange(len(out)), random_.randrange(6)
        if choice == 0:
            out[at] = random_.randrange(256)
        elif choice == 1:
            out[at : at + random_.randrange(4)] = random_.choice(TOKENS)
        elif choice == 2:
            del out[at : at + random_.randrange(30)]
        elif choice == 3:
            start = random_.randrange(len(out))
            out[at:at] = out[start : start + random_.randrange(200)]
        elif choice == 4:
            out[at] ^= 1 << random_.randrange(8)
        else:
            del out[at:]
    return bytes(out)


def parts(trace: Trace) -> dict[str, Any]:
    """All of a trace, columns as types and bytes."""
    columns = {
        f"{table}.{name}": (values.dtype, values.tobytes())
        for table in TABLES
        for name, values in side_columns(getattr(trace, table)).items()
    }
    return {"meta": trace.meta, "strings": trace.strings, "threads": trace.threads, **columns}


def differences(text: bytes, size: int = 1 << 20) -> list[str]:
    """Which parts of a trace the two readers do not agree on; ``size``: bytes of a block."""
    without, with_c = _read(text, size, "1"), _read(text, size, "")
    return sorted(key for key in without.keys() | with_c.keys() if without.get(key) != with_c.get(key))


def _read(text: bytes, size: int, pure: str) -> dict[str, Any]:
    before = os.environ.get(PURE)
    os.environ[PURE] = pure
    try:
        return parts(read_kineto([text[at : at + size] for at in range(0, len(text), size)], "made"))
    except TraceError as error:
        return {"error": str(error)}
    finally:
        os.environ.pop(PURE)
        if before is not None:
            os.environ[PURE] = before
