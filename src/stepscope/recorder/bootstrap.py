"""Starts the recorder in a process, and installs its hooks when the script imports torch.

``stepscope run`` puts the folder ``inject/`` first on PYTHONPATH, so that every Python process of the job runs
``inject/sitecustomize.py``, which calls ``start_from_environment`` here.  Nothing is imported beyond the standard
library until the script itself imports torch; then the hooks are installed.

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
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepscope.recorder import facts
from stepscope.recorder.failure import watch_end
from stepscope.recorder.guard import ImportWatch, Patches, failsafe
from stepscope.recorder.hooks import backward, checkpoint, collectives, compiled, dataloader, ddp, notes
from stepscope.recorder.hooks.compiled import leave_shared_code_alone
from stepscope.recorder.hooks.forward import ForwardProbe
from stepscope.recorder.hooks.loss import StepValues
from stepscope.recorder.hooks.optimizer import OptimizerHooks
from stepscope.recorder.identity import attempt_from, is_launcher, rank_from
from stepscope.recorder.layers.gradient_trail import GradientTrail
from stepscope.recorder.layers.sampler import layer_sampler
from stepscope.recorder.output import keep_output
from stepscope.recorder.recorder import Recorder
from stepscope.recorder.stacks import STATEFUL_LOADER, StackOffer
from stepscope.recorder.worker_server import ServerOffer
from stepscope.records import run_clock
from stepscope.records.files import file_mode, folder_mode
from stepscope.records.identity import RankIdentity
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

__all__ = ["WATCHED_MODULES", "Instrumentation", "current", "start_from_environment", "switched_off"]


# -- Instrumentation --------------------------------------------------------------------------------------------------


class Instrumentation:
    """All hooks of one recorder in the torch of this process; ``remove`` restores torch."""

    def __init__(self, recorder: Recorder, torch: Any, watch: ImportWatch) -> None:
        self._recorder = recorder
        self._patches = Patches()
        self._undo: list[Callable[[], None]] = [self._patches.undo]
        try:
            self._install(recorder, torch, watch)
        except BaseException:
            self.remove()  # half instrumented is worse than not at all
            raise

    def _install(self, recorder: Recorder, torch: Any, watch: ImportWatch) -> None:
        patches = self._patches
        leave_shared_code_alone(torch, recorder)
        forward = ForwardProbe(recorder, torch, patches)
        self._undo.append(forward.disarm)
        optimizer = OptimizerHooks(recorder, torch, patches, watch)
        self._undo.append(optimizer.remove)
        dataloader.install(recorder, torch, patches, watch, forward.expect_evaluation)
        dataloader.install_transfers(recorder, torch, patches)
        checkpoint.install(recorder, torch, patches, watch)
        notes.install(recorder, patches, watch)
        facts.install_step_counters(self._meet_owner, patches, watch)
        collectives.install(recorder, torch, patches, watch)
        ddp.install(recorder, torch, patches)
        ddp.install_stream_waits(recorder, torch, patches)
        backward.install(recorder, torch, patches, StepValues(recorder, torch, patches, watch, os.environ))
        backward.install_deepspeed(recorder, patches, watch)
        compiled.install(recorder, torch, patches)
        recorder.stacks = StackOffer()
        self._undo.append(recorder.stacks.withdraw)
        recorder.server = ServerOffer()
        self._undo.append(recorder.server.withdraw)
        self._undo.append(recorder.stop_snapshots)
        recorder.layers = sampler = layer_sampler(torch, recorder.ledger, os.environ)
        if sampler is not None:
            self._undo.append(sampler.withdraw)
            recorder.trail = trail = GradientTrail(torch, recorder, recorder.ledger.now)
            self._undo.append(trail.stop)
        collectives.install_init_process_group(recorder, torch, patches)
        recorder.ask_after_steps(forward)

    def _meet_owner(self, owner: Any, framework: str, names: tuple[str, ...]) -> None:
        # The recorder of a forked child has new ``objects``.
        self._recorder.objects.global_steps.meet(owner, framework, names)

    def remove(self) -> None:
        self._recorder.ask_after_steps(None)
        while self._undo:
            self._undo.pop()()


# -- Start ------------------------------------------------------------------------------------------------------------

_recorder: Recorder | None = None
_watch = ImportWatch()
_hooks = HOOKS_MISSED
"""What became of the hooks: HOOKS_INSTALLED, HOOKS_MISSED until torch is imported, or the error."""
MAX_ERROR = 500
WATCHED_MODULES = (*checkpoint.FUNCTIONS, *checkpoint.METHODS, *notes.LOGGERS, *facts.STEP_COUNTERS, STATEFUL_LOADER)
"""Modules that may be importing torch when the hooks are installed."""


def current() -> Recorder | None:
    """The recorder of this process, if it has one."""
    return _recorder


def switched_off(environment: Mapping[str, str]) -> bool:
    return environment.get(ENV_SWITCH) == "0"


@failsafe
def start_from_environment() -> None:
    """Start recording; the injected sitecustomize calls this in every Python process of a run."""
    session, run_dir = os.environ.get(ENV_SESSION), os.environ.get(ENV_RUN_DIR)
    if not session or not run_dir or switched_off(os.environ):
        return
    run_clock.follow_environment()
    recorder = start(Path(session), Path(run_dir))
    claims = _claim(Path(run_dir), None if is_launcher(sys.orig_argv) else rank_from(os.environ))
    watch_end(recorder, Path(run_dir), helper=not claims)
    if claims and not is_launcher(sys.orig_argv):
        atexit.register(_note_unrecorded, recorder, Path(run_dir), os.getpid())
    if not claims:
        recorder.when_known(lambda who: _keep_as(Path(run_dir), who))
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
    elif _recorder is not None:
        _recorder.when_known(lambda who: _keep_as(Path(run_dir), who) if who.world_size > 1 else None)


def start(session: Path, run_dir: Path) -> Recorder:
    """Record this process from now on; torch is instrumented when it is imported, or now if it already is."""
    global _recorder
    if _recorder is None:
        _recorder = recorder = Recorder(session, run_dir)
        os.register_at_fork(after_in_child=failsafe(recorder.forget))
        _watch.expect(*WATCHED_MODULES)
        _watch.when_imported("torch", failsafe(lambda torch: _instrument(recorder, torch)))
    return _recorder


def _instrument(recorder: Recorder, torch: object) -> None:
    global _hooks
    try:
        Instrumentation(recorder, torch, _watch)  # torch's own hooks keep it alive until the process ends
    except Exception as error:
        _hooks = f"{type(error).__name__}: {error}"[:MAX_ERROR]
        raise  # counted and reported by the caller's failsafe
    _hooks = HOOKS_INSTALLED


def _note_unrecorded(recorder: Recorder, run_dir: Path, pid: int) -> None:
    """At the end of the script or of a rank: if nothing was recorded of it, write down why."""
    if recorder.ring is not None or os.getpid() != pid:
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
