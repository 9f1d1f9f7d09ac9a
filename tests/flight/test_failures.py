"""Whether an exception is a rank's own, or only word of a peer's death."""

from __future__ import annotations

import pytest

from stepscope.flight.stacks import failure_in, lost_peer

USER = '  File "/code/train.py", line 9, in <module>\n    fetch(url)\n'
SOCKET = '  File "/usr/lib/python3.11/socket.py", line 836, in create_connection\n    sock.connect(sa)\n'
BACKWARD = '  File "/env/site-packages/torch/autograd/graph.py", line 979, in _engine_run_backward\n    run_backward(\n'
ALL_REDUCE = '  File "/env/site-packages/torch/distributed/distributed_c10d.py", line 3, in all_reduce\n    wait()\n'
WAIT = '  File "/env/site-packages/stepscope/recorder/collectives.py", line 210, in wait\n    return original(work)\n'
WORKER = '  File "/env/site-packages/torch/_utils.py", line 733, in reraise\n    raise exception\n'
SAVING = '  File "/env/site-packages/torch/distributed/checkpoint/utils.py", line 2, in reduce_scatter\n    raise it\n'
HEADER = "Traceback (most recent call last):\n"
GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:15575."
IN_A_WORKER = f"Caught ConnectionRefusedError in DataLoader worker process 0.\nOriginal {HEADER}{USER}"
CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"


@pytest.mark.parametrize(
    ("kind", "message", "frames", "lost"),
    [
        ("ConnectionRefusedError", "[Errno 111] Connection refused", USER, False),
        ("ConnectionRefusedError", "[Errno 111] Connection refused", USER + SOCKET, False),
        ("OSError", "Connection reset by peer", USER, False),
        ("OSError", "Connection reset by peer", "", False),
        ("OperationalError", "could not connect to server: Connection refused", USER, False),
        ("ConnectionRefusedError", IN_A_WORKER, USER + WORKER, False),
        ("CheckpointException", "ranks [1]: Connection refused", USER + SAVING, False),
        ("RuntimeError", GLOO, USER + BACKWARD, True),
        ("RuntimeError", GLOO, USER, True),
        ("RuntimeError", "Connection closed by peer", USER + ALL_REDUCE, True),
        ("RuntimeError", "Connection closed by peer", USER + WAIT, True),
        ("RuntimeError", "Connection closed by peer", "", True),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", USER + ALL_REDUCE, False),
        ("DistStoreError", "wait timeout after 300000ms", USER, True),
        (
            "RuntimeError",
            "the step failed: Connection closed by peer",
            f"{USER}{ALL_REDUCE}RuntimeError: Connection closed by peer\n{CAUSED}{HEADER}{USER}",
            True,
        ),
    ],
)
def test_words_of_the_network_count_only_where_a_collective_says_them(
    kind: str, message: str, frames: str, lost: bool
) -> None:
    assert lost_peer(kind, message, f"{HEADER}{frames}{kind}: {message}\n" if frames else "") is lost


@pytest.mark.parametrize(("frames", "own"), [(USER, True), (USER + ALL_REDUCE, False)])
def test_the_end_of_a_log(frames: str, own: bool) -> None:
    failure = failure_in(f"step 30\n{HEADER}{frames}ConnectionResetError: Connection reset by peer\n")
    assert failure is not None
    assert (failure.type, failure.own) == ("ConnectionResetError", own)
