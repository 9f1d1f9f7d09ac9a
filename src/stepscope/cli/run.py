"""``stepscope run``: start any training job, unchanged, with the recorder in every rank."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from stepscope import __version__
from stepscope.agent.on_hang import REPORT, HangPolicy, seconds_from
from stepscope.cli.supervise import JobEnd, signals_held, supervise
from stepscope.cli.words import job_command
from stepscope.errors import RunError, UsageError
from stepscope.records.places import ENV_CLAIM, ENV_RUN_DIR, ENV_SESSION, ENV_SWITCH
from stepscope.store.create import RunPaths, create_run, discard_run
from stepscope.store.meta import end_run

__all__ = ["EPILOG", "HELP", "OPTIONS_BEFORE_JOB", "add_arguments", "record", "run"]

HELP = "run a training script or launcher and record every step"
EPILOG = """\
examples:
  stepscope run train.py --epochs 3
  stepscope run --nproc-per-node 4 train.py
  stepscope run torchrun --nproc-per-node 4 train.py
  stepscope run -m my_package.train --lr 3e-4
  stepscope run accelerate launch train.py

Options of ours stand before the script; everything from the script on is the job's own.
The exit code is the job's own.  STEPSCOPE=0 runs the job as if Stepscope were not there.
"""

OPTIONS_BEFORE_JOB = ("--name", "--dir", "--nproc-per-node", "--nproc_per_node", "--on-hang", "--hang-after")
INJECTED = Path(__file__).parents[1] / "recorder" / "inject"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "stepscope run [options] SCRIPT.py | -m MODULE | LAUNCHER … [arguments]"
    parser.add_argument("--name", help="name of the run (default: the script and the time)")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        metavar="N",
        help="start N ranks with torchrun (a number, cpu, gpu or auto)",
    )
    parser.add_argument(
        "--on-hang",
        metavar="report|abort|CMD",
        default=REPORT,
        help="when the job hangs: only tell (default), end it, or start a command with STEPSCOPE_HANG_FILE set",
    )
    parser.add_argument(
        "--hang-after",
        type=_seconds,
        metavar="SECONDS",
        help="look into a job without progress for so long, or for five steps (default: 10; 0 = never)",
    )
    parser.add_argument("--quiet", action="store_true", help="no summary on the terminal; the files are written")


def run(args: argparse.Namespace) -> int:
    after_s = seconds_from(os.environ) if args.hang_after is None else args.hang_after
    on_hang = HangPolicy(after_s=after_s, action=args.on_hang)
    command = job_command(args.job, args.nproc_per_node)
    return record(command, root=args.dir, name=args.name, quiet=args.quiet, on_hang=on_hang)


def record(
    command: list[str], *, root: Path, name: str | None, quiet: bool = False, on_hang: HangPolicy | None = None
) -> int:
    """Run a job, recorded, to its end; its exit code.  A job that cannot be recorded still runs."""
    if os.environ.get(ENV_SWITCH) == "0":
        os.execv(command[0], command)
    try:
        paths = create_run(root, name, command, version=__version__)
    except RunError as error:
        _say(f"{error}; the job runs unrecorded")
        os.execv(command[0], command)
    for notice in paths.notices:
        _say(notice)
    if not quiet:
        _say(f"recording to {_short(paths.run_dir)}")
    with signals_held() as mask:
        try:
            end = supervise(command, _environment(paths), paths.run_dir, paths.session, mask=mask, on_hang=on_hang)
        except UsageError:
            discard_run(paths)
            raise
        _conclude(paths.run_dir, end, quiet=quiet)
    return end.exit_code


def _conclude(run_dir: Path, end: JobEnd, *, quiet: bool) -> None:
    """Write and show the summary; where it cannot be written it is still shown."""
    # numpy and the store's engine are loaded only now, when the job's own memory is free again.
    from stepscope.cli.finalise import finalise

    try:
        end_run(run_dir, exit_code=end.exit_code, status=end.status)
    except RunError as error:
        _say(str(error))
    try:
        said = {"exit_code": end.exit_code, "status": end.status}
        _, text = finalise(run_dir, end=said, color=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
    except RunError as error:
        _say(f"no summary: {error}")
        return
    if not quiet:
        print(text, file=sys.stderr)


def _environment(paths: RunPaths) -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop(ENV_CLAIM, None)
    earlier = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{INJECTED}{os.pathsep}{earlier}" if earlier else str(INJECTED)
    environment[ENV_RUN_DIR] = str(paths.run_dir)
    environment[ENV_SESSION] = str(paths.session)
    return environment


def _seconds(text: str) -> float:
    """ValueError, which argparse makes a sentence of, for what is no length of time."""
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _short(path: Path) -> str:
    """The path as the user would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _say(message: str) -> None:
    print(f"stepscope: {message}", file=sys.stderr, flush=True)
