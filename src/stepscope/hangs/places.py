"""What the stack of a main thread says: whether it is in a collective, in the input, in a checkpoint, in a compiler …

By the files of its frames.  The innermost frame that is not mere wrapping decides where a thread *is*; frames further
out only say on whose behalf.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from stepscope.records.hang import Frame, ThreadStack

__all__ = [
    "FOR_PROCESS",
    "FOR_USER",
    "at_prompt",
    "collective_call",
    "compiles",
    "evaluates",
    "imports",
    "in_backward",
    "loads_input",
    "main_frames",
    "moved",
    "reads_device",
    "saves",
    "synchronises",
    "waits_for",
]

OURS = ("stepscope/recorder/", "stepscope\\recorder\\")
WRAPPING = (
    "torch/distributed/c10d_logger.py",
    "torch/utils/_contextlib.py",
    "torch/_ops.py",
    "torch/_compile.py",
    "torch/autograd/function.py",
    "/contextlib.py",
    "/functools.py",
)
"""Innermost frames that only pass a call on."""
COLLECTIVES = ("torch/distributed/", "torch/nn/parallel/", "torch/_C/_distributed")
NO_COLLECTIVES = ("torch/distributed/checkpoint/", "torch/distributed/elastic/", "torch/distributed/run.py")
SAVING = ("torch/serialization.py", "torch/distributed/checkpoint/", "/safetensors/", "/tensorstore/")
COMPILING = (
    "torch/_dynamo/convert_frame",
    "torch/_dynamo/symbolic_convert",
    "torch/_inductor/compile_fx",
    "torch/_inductor/codegen",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/async_compile",
    "torch/_inductor/select_algorithm",
    "torch/_inductor/compile_worker",
    "torch/_inductor/autotune",
    "torch/utils/cpp_extension",
    "triton/compiler/",
    "triton/runtime/autotuner",
    "triton/runtime/build",
)
"""Not all of dynamo's files: some stand in the stack of every call of what was compiled long ago."""
INPUT = ("torch/utils/data/", "torchdata/", "/webdataset/", "/nvidia/dali/")
BACKWARD = ("torch/autograd/graph.py", "torch/autograd/__init__.py", "torch/_tensor.py")
SYNCHRONISING = ("torch/cuda/__init__.py", "torch/cuda/streams.py", "torch/xpu/", "torch/mps/", "torch/accelerator/")
SYNCHRONISING_CODE = re.compile(
    r"synchronize\(|\.item\(|\.cpu\(|\.tolist\(|\.numpy\(|\.to\(|\.cuda\(|\.nonzero\(|\bbool\(|\bfloat\(|\bint\(|print\("
)
SAVES = re.compile(r"checkpoint|ckpt|(^|_)(save|snapshot)", re.IGNORECASE)
EVALUATES = re.compile(r"(^|_)(eval|validat|valid(_|$)|test_(epoch|loop|step|model))", re.IGNORECASE)
WHOLE_TRAINING = re.compile(r"train|(^|_)(fit|main|run|worker|loop)(_|$)", re.IGNORECASE)
"""``train_and_evaluate`` does not say that it evaluates just now."""
PROMPTS = ("/ipykernel/kernelapp.py", "/IPython/terminal/")
"""Loops of programs that wait for the next thing that somebody types; what was typed runs further in …"""
CELLS = ("/IPython/core/interactiveshell.py",)
"""… below a frame of these."""
FOR_PROCESS = "waits for a process that it started"
FOR_USER = "waits for somebody to run the next cell"
WAITS = (
    ("socket.py", "waits for a socket"),
    ("ssl.py", "waits for a socket"),
    ("http/client.py", "waits for a server"),
    ("selectors.py", "waits for a socket or pipe"),
    ("subprocess.py", FOR_PROCESS),
    ("multiprocessing/queues.py", "waits in a queue between processes"),
    ("multiprocessing/connection.py", "waits for another process"),
    ("multiprocessing/popen_fork.py", FOR_PROCESS),
    ("multiprocessing/synchronize.py", "waits for a lock between processes"),
    ("queue.py", "waits in a queue"),
    ("threading.py", "waits for a thread or a lock"),
    ("concurrent/futures/", "waits for a thread of its own"),
    ("asyncio/", "waits in an event loop"),
    ("filelock/", "waits for a file lock"),
)
"""By the innermost frame's file; sockets and such before the queues that are made of them."""


def main_frames(threads: Sequence[ThreadStack]) -> tuple[Frame, ...]:
    """Of the main thread, innermost first, without our own; of the only thread if none is said to be the main one."""
    main = next((thread for thread in threads if thread.main), threads[0] if len(threads) == 1 else None)
    return tuple(frame for frame in main.frames if not _in(frame, OURS)) if main else ()


def moved(before: Sequence[ThreadStack], after: Sequence[ThreadStack]) -> bool:
    """Whether any thread was somewhere else at the second look; with fewer than two looks: no."""
    if not before or not after:
        return False
    return [thread.frames for thread in before] != [thread.frames for thread in after]


def collective_call(frames: Sequence[Frame]) -> str | None:
    """The function of torch.distributed that the thread is in (``all_reduce``); None: in none."""
    inner = _inner(frames)
    if inner is None or not _in(inner, COLLECTIVES) or _in(inner, NO_COLLECTIVES):
        return None
    # Helpers of theirs begin with an underscore; the function that the script called says more.
    for frame in frames[frames.index(inner) :]:
        if not _in(frame, (*COLLECTIVES, *WRAPPING)):
            break
        if not frame.function.startswith(("_", "wrapper")) and _in(frame, COLLECTIVES):
            return frame.function
    return inner.function


def imports(frames: Sequence[Frame]) -> bool:
    """Modules being imported run at the depth of whoever asked for them, those of torch.distributed and dynamo too."""
    return any(frame.file.startswith("<frozen importlib") for frame in frames)


def at_prompt(frames: Sequence[Frame]) -> bool:
    """A notebook, or IPython on a terminal, in which nothing runs."""
    return any(_in(frame, PROMPTS) for frame in frames) and not any(_in(frame, CELLS) for frame in frames)


def in_backward(frames: Sequence[Frame]) -> bool:
    inner = _inner(frames)
    return inner is not None and _in(inner, BACKWARD) and "backward" in inner.function


def loads_input(frames: Sequence[Frame]) -> bool:
    return any(_in(frame, INPUT) for frame in frames)


def compiles(frames: Sequence[Frame]) -> bool:
    return any(_in(frame, COMPILING) for frame in frames)


def saves(frames: Sequence[Frame], own: Sequence[Frame]) -> bool:
    """``own``: those of the frames that are the user's."""
    return any(_in(frame, SAVING) for frame in frames) or _named(own, SAVES)


def evaluates(own: Sequence[Frame]) -> bool:
    return _named(own, EVALUATES)


def _named(own: Sequence[Frame], like: re.Pattern[str]) -> bool:
    return any(like.search(frame.function) and not WHOLE_TRAINING.search(frame.function) for frame in own)


def synchronises(frames: Sequence[Frame]) -> bool:
    """Whether the thread is in a call that waits for the device."""
    inner = _inner(frames)
    return inner is not None and _in(inner, SYNCHRONISING)


def reads_device(source: str) -> bool:
    """The same by the text of the innermost line of the user's: methods written in C leave no frame."""
    return bool(SYNCHRONISING_CODE.search(source))


def waits_for(frames: Sequence[Frame], source: str) -> str:
    """In words: what a thread that uses no CPU is up to."""
    inner = _inner(frames)
    if "sleep(" in source:
        return "sleeps"
    for part, words in WAITS if inner is not None else ():
        if inner is not None and _in(inner, (f"/{part}",)):
            return words
    return "stands still"


def _inner(frames: Sequence[Frame]) -> Frame | None:
    return next((frame for frame in frames if not _in(frame, WRAPPING)), frames[0] if frames else None)


def _in(frame: Frame, parts: Sequence[str]) -> bool:
    return any(part in frame.file for part in parts)
