"""Names of the files that a training process writes itself, shared with the store.

A *session* is the folder of one run's rings on one node, in memory (``/dev/shm``) if available; it exists while the run
lasts.  The *run directory* is permanent.

    <session>/<pid>.ring              the ring of one process
    <session>/<pid>.stacks            where it was seen outside all phases, on its way to the agent
    <session>/<pid>.threads           the stacks of all its threads, when it seems to hang
    <session>/<pid>.workers           the stack of one of its DataLoader workers, on its way to the agent
    <session>/<pid>.sock              where torch's worker server listens, in jobs with several ranks
    <session>/<pid>.layers            what sampled steps showed of the model's layers, on its way to the agent
    <session>/capture.json            the last order of a capture (``records/capture.py``), for the agent
    <session>/<pid>.capture           that order, for the process
    <session>/<pid>.captured          how far the process is with it
    <session>/<pid>.trace             the trace, until the agent has moved it
    <session>/<pid>.ask               what ``stepscope snapshot`` wants of the process
    <session>/<pid>.answer            how far the process is with it
    <session>/<pid>.pickle            the snapshot, until the command has taken it
    <run>/rings/<pid>.ring            the ring, when the session has no room
    <run>/errors/<pid>.json           the exception that ended a process
    <run>/unrecorded/<pid>.json       why nothing was recorded of a script or rank that ended by itself
    <run>/flight/rank_<rank>.json     the contents of its Flight Recorders at that time
    <run>/memory/rank_<rank>.pickle   the state of CUDA's allocator when the process ran out of memory
    <run>/flight/nccl_trace_rank_<rank>   the dump that NCCL's own watchdog wrote before it ended the process
    <run>/logs/<name>.log             what a process printed: rank-3, or main for a launcher
    <run>/logs/terminal.log           what would have gone to the terminal without the live view
    <run>/outputs/<pid>.json          the files that receive the output of a process, for the agent to copy
    <run>/outputs/<pid>.<streams>     with --native-output, such a file: 1, 2 or, if both go to one place, 12
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = [
    "ANSWER_SUFFIX",
    "ASK_SUFFIX",
    "BESIDE_RING",
    "CAPTURED_SUFFIX",
    "CAPTURES",
    "CAPTURE_SUFFIX",
    "ENV_ALERT",
    "ENV_ALERT_SETTINGS",
    "ENV_CAPTURE",
    "ENV_CLAIM",
    "ENV_CLAIMANT",
    "ENV_CLOCK",
    "ENV_C_HOOKS",
    "ENV_FRAMEWORKS",
    "ENV_HANG_AFTER",
    "ENV_HTML",
    "ENV_KEEP_EVIDENCE",
    "ENV_KEY",
    "ENV_LAYERS",
    "ENV_NATIVE",
    "ENV_NVTX",
    "ENV_PROFILE",
    "ENV_RUN_DIR",
    "ENV_SERVER",
    "ENV_SESSION",
    "ENV_STACKS",
    "ENV_SWITCH",
    "ENV_TEAM_HUB",
    "ENV_TEAM_KEY",
    "ENV_TEAM_KEY_FILE",
    "ENV_TORCH_DUMPS",
    "ENV_USER",
    "FLIGHT",
    "HANGS",
    "HOOKS_INSTALLED",
    "HOOKS_MISSED",
    "LAYERS_SUFFIX",
    "LAYER_MODES",
    "PRINTED_SUFFIX",
    "RING_SUFFIX",
    "SERVER_SUFFIX",
    "SESSION_CAPTURE",
    "SESSION_LOCK",
    "SESSION_RUN",
    "SNAPSHOT_SUFFIX",
    "STACKS_SUFFIX",
    "THREADS_SUFFIX",
    "TRACE_SUFFIX",
    "UNRECORDED",
    "WORKERS_SUFFIX",
    "capture_folder",
    "error_path",
    "flight_path",
    "hangs_folder",
    "helper_command",
    "helper_environment",
    "log_of_rank",
    "log_path",
    "nccl_dumps",
    "output_note",
    "outputs_folder",
    "readable_command",
    "ring_paths",
    "server_threads",
    "session_root",
    "snapshot_path",
    "terminal_log",
    "timed_collectives",
    "unrecorded_path",
]

ENV_SWITCH = "STEPSCOPE"
"""``0`` switches everything off."""
ENV_USER = "STEPSCOPE_USER"
"""Who starts the run, where the user of the process does not say it: in containers everyone may be root."""
ENV_STACKS = "STEPSCOPE_STACKS"
"""``0``: ranks are never asked for their stacks."""
ENV_C_HOOKS = "STEPSCOPE_C_HOOKS"
"""``1``: ordinary calls of hooks are handled in C, where that part was built (``recorder/hooks/native.py``)."""
ENV_HANG_AFTER = "STEPSCOPE_HANG_AFTER"
"""Seconds without progress after which the watchdog investigates; ``0``: never."""
ENV_KEEP_EVIDENCE = "STEPSCOPE_KEEP_EVIDENCE"
"""``1``: keep what the watchdog gathers in single-host jobs, too, for tests to replay."""
ENV_KEY = "STEPSCOPE_KEY"
ENV_TEAM_HUB = "STEPSCOPE_HUB"
"""Address of the team's hub, which gets every run that starts here (``cli/launch/team_hub.py``); ``off``: none."""
ENV_TEAM_KEY = "STEPSCOPE_HUB_KEY"
"""The key that proves a sender to the team's hub; not passed on to the job."""
ENV_TEAM_KEY_FILE = "STEPSCOPE_HUB_KEY_FILE"
ENV_LAYERS = "STEPSCOPE_LAYERS"
"""One of LAYER_MODES; not set: ``sampled``."""
LAYER_MODES = ("off", "sampled", "every")
"""At which steps the layers of the model are looked at: never, now and then, at each step."""
ENV_PROFILE = "STEPSCOPE_PROFILE"
"""A schedule of captures as of ``run --profile`` (``records/capture.py``)."""
ENV_NVTX = "STEPSCOPE_NVTX"
"""``1``: steps and phases are labeled for other profilers all the time."""
ENV_ALERT = "STEPSCOPE_ALERT"
"""Words as of ``run --alert``, separated by blanks; may contain secrets, and is not passed on to the job."""
ENV_ALERT_SETTINGS = "STEPSCOPE_ALERT_SETTINGS"
"""Checked settings of alerts, in the environment of the run's hub and sender only."""
ENV_CAPTURE = "STEPSCOPE_CAPTURE"
"""``off``, or how many captures an hour may be taken because of findings (``store/captures.py``)."""
ENV_FRAMEWORKS = "STEPSCOPE_FRAMEWORKS"
"""``0``: frameworks are not hooked to learn their step numbers, epochs and evaluations."""
ENV_SERVER = "STEPSCOPE_SERVER"
"""``0``: torch's worker server is never started."""
NCCL_TIMING, OLD_NCCL_TIMING = "TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING"
"""torch reads the second if the first is not set."""
TEARDOWN_CUPTI = "TEARDOWN_CUPTI"
"""torch's: with 1 its profiler unloads CUPTI when it has ended."""
FR_BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
OLD_FR_BUFFER_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""torch warns about it, so it is never set here."""
ENV_HTML = "STEPSCOPE_HTML"
"""``0``: no ``report.html`` at the end of a run."""
ENV_NATIVE = "STEPSCOPE_NATIVE_OUTPUT"
"""Set by ``run --native-output``: the launcher's descriptors 1 and 2 as ``DEV:INODE``; ``-``: left alone."""
ENV_RUN_DIR = "STEPSCOPE_RUN_DIR"
ENV_SESSION = "STEPSCOPE_SESSION"
ENV_CLOCK = "STEPSCOPE_CLOCK_NS"
"""Set by the launcher, as ``BOOT:NS``: the offset of the run's clock from the monotonic clock of that boot of that
machine (``records/run_clock.py``)."""
ENV_CLAIM = "STEPSCOPE_CLAIMED"
ENV_CLAIMANT = "STEPSCOPE_CLAIMED_BY"
"""Set by a process that is a rank (or the script), so that its children see that they are not."""
RING_SUFFIX = ".ring"
STACKS_SUFFIX = ".stacks"
THREADS_SUFFIX = ".threads"
WORKERS_SUFFIX = ".workers"
SERVER_SUFFIX = ".sock"
LAYERS_SUFFIX = ".layers"
ASK_SUFFIX, ANSWER_SUFFIX, SNAPSHOT_SUFFIX = ".ask", ".answer", ".pickle"
CAPTURE_SUFFIX, CAPTURED_SUFFIX, TRACE_SUFFIX = ".capture", ".captured", ".trace"
SESSION_CAPTURE = "capture.json"
CAPTURES = "captures"
PRINTED_SUFFIX = ".printed"
"""In the session: what a process printed, on its way to the log of a run on a remote file system."""
BESIDE_RING = (
    *(STACKS_SUFFIX, THREADS_SUFFIX, WORKERS_SUFFIX, SERVER_SUFFIX, LAYERS_SUFFIX),
    *(ASK_SUFFIX, ANSWER_SUFFIX, SNAPSHOT_SUFFIX, ".asking", ".partial"),
    *(CAPTURE_SUFFIX, CAPTURED_SUFFIX, TRACE_SUFFIX),
)
"""Removed together with the ring."""
ENV_TORCH_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""They tell torch where NCCL's watchdog writes the Flight Recorder of a rank; torch appends the rank's number."""
FLIGHT = "flight"
UNRECORDED = "unrecorded"
HOOKS_INSTALLED, HOOKS_MISSED = "installed", "missed"
"""In ``unrecorded/``: what became of the hooks; ``missed``: torch is loaded, but its import was not noticed."""
HANGS = "hangs"
SESSION_LOCK = "agent.lock"
"""In the session of ``stepscope.init()``: locked by its agent, it contains the path of the run."""
SESSION_RUN = "run"
"""In every session: the random number of the run that it belongs to, called its spool in ``run.json``."""


def session_root() -> Path:
    """The folder of this user's sessions, in memory if the machine offers that."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        import tempfile  # a rank's start does not wait for it elsewhere

        memory = Path(tempfile.gettempdir())
    return memory / f"stepscope-{os.getuid()}"


def ring_paths(session: Path, run_dir: Path, pid: int) -> tuple[Path, Path]:
    """Where to put the ring of a process: first choice and fallback."""
    return session / f"{pid}{RING_SUFFIX}", run_dir / "rings" / f"{pid}{RING_SUFFIX}"


def unrecorded_path(run_dir: Path, pid: int) -> Path:
    return run_dir / UNRECORDED / f"{pid}.json"


def error_path(run_dir: Path, pid: int) -> Path:
    return run_dir / "errors" / f"{pid}.json"


def flight_path(run_dir: Path, rank: int) -> Path:
    return run_dir / FLIGHT / f"rank_{rank}.json"


def snapshot_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "memory" / f"rank_{rank}.pickle"


def capture_folder(run_dir: Path, capture: str) -> Path:
    return run_dir / CAPTURES / capture


def nccl_dumps(run_dir: Path) -> str:
    """Path prefix of the dumps of NCCL's watchdog; the rank's number follows."""
    return str(run_dir / FLIGHT / "nccl_trace_rank_")


def hangs_folder(run_dir: Path) -> Path:
    return run_dir / HANGS


def log_path(run_dir: Path, *, rank: int | None, attempt: int) -> Path:
    name = "main" if rank is None else f"rank-{rank}"
    if attempt:
        name += f".attempt-{attempt}"
    return run_dir / "logs" / f"{name}.log"


def log_of_rank(run_dir: Path, *, rank: int, attempt: int) -> Path:
    """Where its output is: its own log, or the script's if the only process was never given a rank."""
    own = log_path(run_dir, rank=rank, attempt=attempt)
    if rank == 0 and not own.exists():
        alone = log_path(run_dir, rank=None, attempt=attempt)
        return alone if alone.exists() else own
    return own


def terminal_log(run_dir: Path) -> Path:
    return run_dir / "logs" / "terminal.log"


def server_threads() -> int:
    """Threads of torch's worker server: its library, httplib, starts one per core (less one), and at least eight."""
    return max(8, (os.cpu_count() or 1) - 1)


def timed_collectives(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make NCCL's Flight Recorder time collectives, unless the user has set them.

    Without a worker server or a buffer it could not be read.  The recorder is on by default; older versions of torch
    need the variable.
    """
    sizes = [environ[name] for name in (FR_BUFFER_SIZE, OLD_FR_BUFFER_SIZE) if name in environ]
    if environ.get(ENV_SERVER) == "0" or "0" in sizes or OLD_NCCL_TIMING in environ:
        return {}
    sized = bool(sizes)
    wanted = {NCCL_TIMING: "1", **({} if sized else {FR_BUFFER_SIZE: "2000"})}
    return {name: value for name, value in wanted.items() if name not in environ}


def outputs_folder(run_dir: Path) -> Path:
    return run_dir / "outputs"


def output_note(run_dir: Path, pid: int) -> Path:
    return outputs_folder(run_dir) / f"{pid}.json"


_HELPER = (
    "import sys, os; lib = os.path.dirname(os.__file__); "
    "sys.path[:] = sorted(filter(None, sys.path), key=lambda p: p not in (lib, os.path.join(lib, 'lib-dynload'))); "
    "import importlib.util as u; home = sys.argv.pop(1); "
    "s = u.spec_from_file_location('stepscope', os.path.join(home, '__init__.py'), submodule_search_locations=[home]); "
    "m = sys.modules['stepscope'] = u.module_from_spec(s); s.loader.exec_module(m); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def helper_command(module: str, *words: str, python: str = sys.executable) -> list[str]:
    """Command for a Stepscope process outside the job: ``python -m MODULE WORDS``, but safely.

    A file in the working directory or on PYTHONPATH that is named like a module of the standard library must not run in
    it.  ``-P`` is not in Python 3.10; ``-I`` would lose PYTHONPATH and the user's site-packages, which may contain
    Stepscope and its dependencies.  So the working directory is removed from the path, and the standard library put
    first, before anything is imported (``sys`` and ``os`` always are).  Stepscope itself is loaded from where this file
    is, also if there is another module of that name.
    """
    return [python, "-c", _HELPER, str(Path(__file__).parents[1]), module, *words]


def readable_command(words: Sequence[str]) -> list[str]:
    """The command of a process as people know it: that of a helper as ``python -m MODULE WORDS``."""
    if len(words) > 4 and words[1:3] == ["-c", _HELPER]:
        return [words[0], "-m", *words[4:]]
    return list(words)


def helper_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of such a process: it finds this very Stepscope, and nothing in the working directory."""
    import sysconfig

    ours = {ENV_SWITCH, ENV_RUN_DIR, ENV_SESSION, ENV_CLAIM, ENV_CLAIMANT, ENV_CLOCK, ENV_NATIVE, "PYTHONPATH"}
    ours |= {ENV_ALERT, ENV_ALERT_SETTINGS}
    environment = {name: value for name, value in environ.items() if name not in ours}
    # An empty entry, as in PYTHONPATH=$PYTHONPATH:/somewhere, is the working directory.
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [entry for entry in entries if entry and os.path.normpath(entry) != os.curdir]
    package = str(Path(__file__).parents[2])
    if package not in sysconfig.get_paths().values():
        folders.append(package)
    if folders:
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    return environment
