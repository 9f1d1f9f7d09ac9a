"""Several ranks on one GPU, side by side: NVIDIA's multi-process service (MPS), started for a while.

Without it processes share a GPU in time slices, so a kernel of one rank that waits for another rank takes the other's
slices: a healthy DDP step of two ranks takes 41 ms instead of 9 on an H200, and faults of 10 ms disappear in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["gpu_count", "mps"]

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""Under MPS a client has so few by default that streams share them: what one stream waits for then stops another, and
FSDP's computation stood still where nothing made it wait (seen on an H200).  With 32 of them for each of a dozen
clients the device is "busy or unavailable"."""
WAIT_S = 30.0


def gpu_count() -> int:
    """Those that a job of ours sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


@contextlib.contextmanager
def mps(*, ranks: int, wanted: bool = True) -> Iterator[tuple[dict[str, str], str]]:
    """A daemon of our own while this lasts: what its clients need in their environment, and in words what is so."""
    gpus = gpu_count()
    why_not = ""
    if gpus == 0:
        why_not = "no GPU"
    elif gpus >= ranks:
        why_not = "every rank has a GPU of its own"
    elif not wanted or not shutil.which(CONTROL):
        why_not = f"without MPS: {ranks} ranks share {gpus} GPUs in time slices"
    if why_not:
        yield {}, why_not
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        places = {PIPES: str(Path(folder) / "pipes"), LOGS: str(Path(folder) / "logs")}
        for place in places.values():
            Path(place).mkdir()
        environment = {**os.environ, **places}
        problem = _control(["-d"], environment)
        if problem:
            yield {}, f"without MPS, which did not start ({problem}): ranks share the GPU in time slices"
            return
        try:
            yield {**places, **CONNECTIONS}, f"with MPS: kernels of up to {ranks} ranks run side by side on {gpus} GPUs"
        finally:
            # It ends its servers too; what is left of them if it cannot ends with the last client.
            _control([], environment, says="quit\n")


def _control(arguments: list[str], environment: dict[str, str], says: str = "") -> str:
    """Empty, or what went wrong."""
    # Not through pipes: the daemon would keep them open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as typed:
        typed.write(says)
        typed.seek(0)
        try:
            done = subprocess.run(
                [CONTROL, *arguments], env=environment, stdin=typed, stdout=out, stderr=out, timeout=WAIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        out.seek(0)
        return out.read().strip() or f"exit code {done.returncode}" if done.returncode else ""
