"""Stands in for a process with libkineto: asks the daemon for work, and writes the trace that it is asked for.

    python kineto_client.py FOLDER [BEHAVIOR]

FOLDER holds the daemon's socket.  BEHAVIOR: ``busy`` (its profiler is in use), ``silent`` (never asks), ``deaf`` (gets
the configuration and writes nothing), ``mortal`` (ends on the configuration).  Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
import uuid
from pathlib import Path

folder, behavior = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
print("ready", flush=True)
if behavior == "silent":
    time.sleep(600)
own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
own.bind(str(folder / f"dynoconfigclient{uuid.uuid4()}"))
own.settimeout(0.1)
mask = 1 if behavior == "busy" else 3
pids = [os.getpid(), os.getppid()]
payload = struct.pack(f"=iiq{len(pids)}i", mask, len(pids), 0, *pids)
registration = struct.pack("=iiq", 0, os.getpid(), 0)
requests = [(b"ctxt", registration), (b"\xff" * 10, b"x"), (b"req", payload)]
while True:
    for kind, content in requests:
        try:
            own.sendto(struct.pack("=Q32s", len(content), kind) + content, str(folder / "dynolog"))
        except OSError:
            break
    try:
        answer, sender = own.recvfrom(65536)
    except TimeoutError:
        continue
    if sender != str(folder / "dynolog"):
        os.abort()  # as libkineto does
    if answer[8:12] != b"req\0":
        continue
    settings = dict(line.split("=", 1) for line in answer[40:].decode().splitlines())
    if behavior == "mortal":
        sys.exit()
    if behavior == "deaf":
        continue
    wanted = Path(settings["ACTIVITIES_LOG_FILE"])
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": pids[0], "tid": pids[0], "ts": 1.0, "dur": 5.0}
    document = {"schemaVersion": 1, "settings": settings, "traceEvents": [event]}
    spare = wanted.with_name(f"{wanted.stem}_{pids[0]}.json.tmp")
    spare.write_text(json.dumps(document))
    spare.rename(spare.with_suffix(""))
