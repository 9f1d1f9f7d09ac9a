"""Starts the recorder in a process, and installs its hooks when the script has imported torch.

``stepscope run`` puts the folder ``inject/`` first on PYTHONPATH, so that every Python process of the job runs
``inject/sitecustomize.py``, which calls ``start_from_environment`` here.  Until the script has imported torch, only
what keeps its output and notices its end is loaded: the script's first line waits for it.  Then come the recorder and
its hooks.  A file of the script may be named like a module of the standard library, and the script's folder is on the
path by then: what they need of the library is loaded by torch, or here.

Ranks are the process that the launcher started, and each process that a launcher gave its own rank.  Their Python
children (DataLoader workers, compile workers) inherit the claim (``ENV_CLAIM``) and are helpers: they leave nothing
behind, unless they turn out to train themselves.  Then they have a log from there on.

Why PYTHONPATH and sitecustomize: this reaches every rank whatever starts it, and ``sys.argv``, ``__main__`` and the
working directory stay the script's own. The price: ``python -I`` and ``-E`` ignore it.
"""

from __future__ import annotations

import atexit
import json
import os
import resource  # noqa: F401 - this and the next: what the hooks need and torch does not load
import sys
import sysconfig  # noqa: F401
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.recorder.failure import watch_end
from stepscope.recorder.guard import ImportWatch, failsafe
from stepscope.recorder.identity import attempt_from, is_launcher, rank_from, start_times
from stepscope.recorder.output import keep_output
from stepscope.records import run_clock
from stepscope.records.files import file_mode, folder_mode
from stepscope.records.paths import (
    ENV_CLAIM,
    ENV_CLAIMANT,
    ENV_RUN_DIR,
    ENV_SESSION,
    ENV_SWITCH,
    HOOKS_INSTALLED,
    HOOKS_MISSED,
    log_path,
    unrecorded_path,
)

if TYPE_CHECKING:
    from stepscope.recorder.recorder import Recorder
    from stepscope.records.identity import RankIdentity

__all__ = ["WATCHED_MODULES", "current", "recorder_class", "start_from_environment", "switched_off"]


_where: tuple[Path, Path] | None = None
"""The session and the run directory of a process that is recorded."""
_recorders: dict[str, Recorder] = {}
"""The recorder, once it is needed.  In a dictionary, whose ``setdefault`` keeps one if two threads need it at once."""
_when_known: Callable[[RankIdentity], None] | None = None
_forked_before = False
"""Whether this process was forked by one that had no recorder yet."""
_watch = ImportWatch()
_hooks = HOOKS_MISSED
"""What became of the hooks: HOOKS_INSTALLED, HOOKS_MISSED until torch is imported, or the error."""
MAX_ERROR = 500
WATCHED_MODULES = (
    "accelerate.accelerator",
    "deepspeed.runtime.engine",
    "lightning.fabric.fabric",
    "lightning.pytorch.loops.evaluation_loop",
    "lightning.pytorch.loops.fit_loop",
    "lightning.pytorch.loops.prediction_loop",
    "lightning.pytorch.loops.training_epoch_loop",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector",
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning.loops.evaluation_loop",
    "pytorch_lightning.loops.fit_loop",
    "pytorch_lightning.loops.prediction_loop",
    "pytorch_lightning.loops.training_epoch_loop",
    "pytorch_lightning.trainer.connectors.logger_connector.logger_connector",
    "pytorch_lightning.trainer.trainer",
    "ray.train.v2._internal.execution.train_fn_utils",
    "safetensors",
    "safetensors.torch",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.utils.tensorboard.writer",
    "torchdata.stateful_dataloader.stateful_dataloader",
    "torchtitan.components.metrics",
    "torchtitan.components.validate",
    "transformers.trainer",
    "transformers.trainer_callback",
    "wandb.sdk.wandb_run",
)
"""All modules that hooks wait for, and that may be importing torch when the hooks are installed.  The hooks name them
as well (``checkpoint.FUNCTIONS`` …), but are not loaded yet; a test compares."""


def current() -> Recorder | None:
    """The recorder of this process, if it is recorded; made when it is first asked for."""
    return _recorders.get("this") or _make()


def recorder_class() -> type[Recorder]:
    """The recorder that this process gets, with hooks in Python or in C."""
    from stepscope.recorder.hooks import native
    from stepscope.recorder.recorder import Recorder

    return (native.recorder_class() if native.are_wanted() else None) or Recorder


@failsafe
def _make() -> Recorder | None:
    global _where
    if _where is None:
        return None
    try:
        recorder = recorder_class()(*_where)
        if _forked_before:
            recorder.forget()
        if _when_known is not None:
            recorder.when_known(_when_known)
    except BaseException:
        _where = None  # it is not tried again
        raise
    return _recorders.setdefault("this", recorder)


def _tell_when_known(tell: Callable[[RankIdentity], None]) -> None:
    """As ``Recorder.when_known``, now or when there is a recorder."""
    global _when_known
    _when_known = tell
    if (recorder := _recorders.get("this")) is not None:
        recorder.when_known(tell)


@failsafe
def _forget() -> None:
    global _forked_before
    if (recorder := _recorders.get("this")) is not None:
        recorder.forget()
    _forked_before = True


def switched_off(environment: Mapping[str, str]) -> bool:
    return environment.get(ENV_SWITCH) == "0"


@failsafe
def start_from_environment() -> None:
    """Start recording; the injected sitecustomize calls this in every Python process of a run."""
    session, run_dir = os.environ.get(ENV_SESSION), os.environ.get(ENV_RUN_DIR)
    if not session or not run_dir or switched_off(os.environ):
        return
    run_clock.follow_environment()
    start(Path(session), Path(run_dir))
    claims = _claim(Path(run_dir), None if is_launcher(sys.orig_argv) else rank_from(os.environ))
    watch_end(_known_recorder, Path(run_dir), helper=not claims)
    if claims and not is_launcher(sys.orig_argv):
        atexit.register(_note_unrecorded, Path(run_dir), os.getpid())
    if not claims:
        _tell_when_known(lambda who: _keep_as(Path(run_dir), who))
    os.register_at_fork(after_in_child=_forked)


def _claim(run_dir: Path, rank: int | None) -> bool:
    """Become that rank, with its own log; False: the parent is that rank."""
    claim = "main" if rank is None else f"rank {rank}"
    if os.environ.get(ENV_CLAIM) == claim:
        return False
    os.environ[ENV_CLAIM], os.environ[ENV_CLAIMANT] = claim, str(os.getpid())
    log = log_path(run_dir, rank=rank, attempt=attempt_from(os.environ))
    keep_output(run_dir, log, rank=rank, launcher=is_launcher(sys.orig_argv))
    return True


@failsafe
def _keep_as(run_dir: Path, who: RankIdentity) -> None:
    """A helper turned out to train as this rank: its output belongs to that rank from now on."""
    keep_output(run_dir, log_path(run_dir, rank=who.rank, attempt=who.attempt), rank=who.rank, launcher=False)


@failsafe
def _forked() -> None:
    """Claim the rank of a forked child that got it before the fork, from a launcher that loads torch once for all.

    A child that learns its rank later, from its process group, has its own log from there on.
    """
    rank, run_dir = rank_from(os.environ), os.environ.get(ENV_RUN_DIR)
    if not run_dir or ENV_CLAIM not in os.environ:
        return
    if rank is not None:
        _claim(Path(run_dir), rank)
    else:
        _tell_when_known(lambda who: _keep_as(Path(run_dir), who) if who.world_size > 1 else None)


def _known_recorder() -> Recorder | None:
    """The recorder if there is one already."""
    return _recorders.get("this")


def start(session: Path, run_dir: Path) -> None:
    """Record this process from now on; torch is instrumented when it is imported, or now if it already is."""
    global _where
    if _where is None:
        _where = (session, run_dir)
        os.register_at_fork(after_in_child=_forget)
        _watch.expect(*WATCHED_MODULES)
        _watch.when_imported("torch", failsafe(_instrument))


def _instrument(torch: object) -> None:
    global _hooks
    start_times.imported_ns = time.perf_counter_ns()
    try:
        from stepscope.recorder.instrumentation import Instrumentation

        recorder = current()
        if recorder is None:
            raise RuntimeError("there is no recorder")
        Instrumentation(recorder, torch, _watch)  # torch's own hooks keep it alive until the process ends
    except Exception as error:
        _hooks = f"{type(error).__name__}: {error}"[:MAX_ERROR]
        raise  # counted and reported by the caller's failsafe
    _hooks = HOOKS_INSTALLED


def _note_unrecorded(run_dir: Path, pid: int) -> None:
    """At the end of the script or of a rank: if nothing was recorded of it, write down why."""
    recorder = _known_recorder()
    if (recorder is not None and recorder.ring is not None) or os.getpid() != pid:
        return
    torch: Any = sys.modules.get("torch")
    account = {
        "pid": pid,
        "script": os.path.basename(sys.argv[0] if sys.argv else ""),  # noqa: PTH119 - pathlib takes longer to load
        "torch": str(getattr(torch, "__version__", "")),
        "hooks": _hooks,
    }
    path = unrecorded_path(run_dir, pid)
    try:
        path.parent.mkdir(mode=folder_mode(run_dir), exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file_mode(run_dir)), "w") as file:
            json.dump(account, file)
    except OSError:
        pass  # the summary then explains the empty run without it
