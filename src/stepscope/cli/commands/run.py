"""``stepscope run``: start any training job, unchanged, with the recorder in every rank."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.agent.hangs.on_hang import ABORT, REPORT, HangPolicy, seconds_from
from stepscope.alerts.settings_places import are_there_settings
from stepscope.cli.arguments import amount, port_number
from stepscope.cli.launch.command import (
    MASTER_PORT,
    NodeOptions,
    Nodes,
    SlurmStep,
    Torchrun,
    find_nodes,
    job_command,
    misplaced_options,
    slurm_step,
    starts_ranks,
)
from stepscope.cli.launch.helpers import DEFAULT_PORT, ExportOptions, HubOptions
from stepscope.cli.launch.record import JobOptions, record
from stepscope.errors import UsageError
from stepscope.records.files import PRIVATE, SHARED_WITH
from stepscope.records.paths import ENV_ALERT, ENV_SWITCH, ENV_TEAM_HUB, LAYER_MODES
from stepscope.records.text import default_name, did_you_mean, nearest, say

if TYPE_CHECKING:
    from stepscope.alerts.settings import AlertSettings
    from stepscope.archive.location import ArchiveUrl
    from stepscope.cli.launch.team_hub import TeamHub

__all__ = ["add_arguments", "own_options", "without_option"]

HELP = "run a training script or launcher and record every step"
EPILOG = """\
examples:
  stepscope run train.py --epochs 3
  stepscope run --nproc-per-node 4 train.py
  stepscope run --live train.py
  stepscope run --alert slack train.py
  stepscope run torchrun --nproc-per-node 4 train.py
  stepscope run -m my_package.train --lr 3e-4
  stepscope run accelerate launch train.py
  stepscope run --nnodes 2 --node-rank 0 --master-addr node0 --name big --nproc-per-node 8 train.py
  stepscope run --hub-only --nnodes 3 --name big
  srun stepscope run train.py

Stepscope's options come before the script; the script and everything after it go to the job.
The exit code is the job's.  STEPSCOPE=0 runs the job without Stepscope.
"""

OPTIONS_BEFORE_JOB = (
    *("--name", "--tag", "--dir", "--nproc-per-node", "--nproc_per_node", "--on-hang", "--hang-after"),
    *("--share", "--alert", "--to", "--archive", "--max-disk", "--max_disk", "--layers", "--profile", "--capture"),
    *("--nnodes", "--node-rank", "--node_rank", "--master-addr", "--master_addr", "--master-port", "--master_port"),
    *("--hub-host", "--hub_host", "--hub-port", "--hub_port", "--tls-cert", "--tls_cert", "--tls-key", "--tls_key"),
)

ONLY_OURS = (
    "nproc-per-node",
    "on-hang",
    "alert",
    "archive",
    "hang-after",
    "max-disk",
    "native-output",
    "hub-host",
    "hub-port",
    "no-hub",
)
"""Options that a training script is unlikely to have."""
RANK_WORDS = ("cpu", "gpu", "auto", "xpu", "npu", "hpu", "mlu", "musa")
"""What torchrun accepts besides a number; the last ones need a torch built for that device."""
_UNITS = "KMGT"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "stepscope run [options] SCRIPT.py | -m MODULE | LAUNCHER … [arguments]"
    parser.add_argument("--name", help="name of the run (default: the script and the time)")
    parser.add_argument(
        "--tag", type=_tag, action="append", default=[], metavar="TAG", help="a tag for the run; may be repeated"
    )
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=_ranks,
        metavar="N",
        help="start N ranks with torchrun (a number, cpu, gpu or auto)",
    )
    parser.add_argument(
        "--on-hang",
        type=_on_hang,
        metavar="report|abort|CMD",
        default=REPORT,
        help="when the job hangs: only report it (default), end it, or run a command with STEPSCOPE_HANG_FILE set",
    )
    parser.add_argument(
        "--hang-after",
        type=amount("seconds"),
        metavar="SECONDS",
        help="inspect a job without progress for this long, or five steps if longer (default: 10; 0 = never)",
    )
    parser.add_argument(
        "--alert",
        action="append",
        default=[],
        metavar="WORD",
        help="send messages when something is wrong: slack, pagerduty, https://HOST/HOOK, command=PROGRAM, the name of "
        "a receiver in stepscope.toml; or add a rule: no_step=300, run_finished; off: send nothing; may be repeated "
        "(docs/alerts.md; try it with `stepscope alerts test`)",
    )
    parser.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="TOOL[:WHERE],…",
        help="write steps, phases and findings to a tracker while the job runs: tensorboard:FOLDER, wandb[:PROJECT], "
        "mlflow[:URI], trackio[:PROJECT], otlp:URL; several separated by commas; in addition to [export] in "
        "stepscope.toml, off: none of those; at the end a tool that does not answer is waited for 20 seconds "
        "(docs/export.md)",
    )
    parser.add_argument(
        "--archive",
        metavar="URL",
        help="copy the run to object storage when it is over: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, file:///FOLDER; "
        "default: to in [archive] of stepscope.toml, off: nowhere (docs/archive.md)",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="show the run live in the terminal; the job's output goes to logs/terminal.log",
    )
    parser.add_argument(
        "--native-output",
        "--native_output",
        action="store_true",
        help="also keep output of native code (NCCL, CUDA, the C library) in each rank's log; output then passes "
        "through files in the run, unless it goes to a terminal",
    )
    parser.add_argument(
        "--layers",
        choices=LAYER_MODES,
        help="look at the model's layers never, in a few sampled steps, or in every step, which slows the job down "
        "(default: sampled)",
    )
    parser.add_argument(
        "--profile",
        type=_schedule,
        metavar="WHEN",
        help="capture steps with torch.profiler on schedule: wait=500,warmup=2,active=6,repeat=3,ranks=0+3, like "
        "torch.profiler.schedule, also memory, shapes, no-stacks; or baseline: 10 steps early in the run "
        "(default ranks: 0; docs/capture.md)",
    )
    parser.add_argument(
        "--nvtx",
        action="store_true",
        help="label steps, phases and sampled layers for Nsight (NVTX) and for torch.profiler",
    )
    parser.add_argument(
        "--capture",
        metavar="WHEN",
        help="off; N: profile a few steps of slow ranks automatically, at most N times an hour (default: 4, on GPUs "
        "off), keep=SIZE: of all traces (default: 2GB)",
    )
    parser.add_argument("--quiet", action="store_true", help="print no summary; still write the files")
    parser.add_argument(
        "--share",
        choices=tuple(SHARED_WITH),
        help="let your group, or all users of this machine, read the run (default: only you)",
    )
    parser.add_argument(
        "--max-disk",
        "--max_disk",
        type=_size,
        metavar="SIZE",
        help="maximum size of the run on each node's disk: 10G, 500M (default: 20G; 0 = no limit); near the limit "
        "samples get coarser and logs shorter, but every step is kept",
    )
    parser.add_argument("--no-html", "--no_html", action="store_true", help="do not write report.html at the end")
    _add_nodes(parser.add_argument_group("several nodes", "the same command on every node, except for --node-rank"))
    _add_hub(
        parser.add_argument_group("the hub", "receives the data of other nodes and serves the page of the active run")
    )


def _schedule(text: str) -> str:
    from stepscope.records.capture import parse_schedule

    try:
        parse_schedule(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _add_nodes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--nnodes", metavar="N", default="", help="number of nodes, or minimum and maximum (1:4)")
    group.add_argument(
        "--node-rank", "--node_rank", metavar="K", default="", help="rank of this node; node 0 runs the hub"
    )
    group.add_argument("--master-addr", "--master_addr", metavar="HOST", default="", help="address of node 0")
    group.add_argument(
        "--master-port",
        "--master_port",
        type=port_number(),
        metavar="P",
        help=f"torchrun's port on node 0 (default: {MASTER_PORT})",
    )


def _add_hub(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hub-host",
        "--hub_host",
        metavar="ADDR",
        default="",
        help="address to listen on (default: loopback; with several nodes, all interfaces)",
    )
    group.add_argument(
        "--hub-port",
        "--hub_port",
        type=port_number(),
        metavar="P",
        help=f"port to listen on (default: {DEFAULT_PORT} with several nodes, from the job ID under Slurm, else any)",
    )
    group.add_argument(
        "--tls-cert", "--tls_cert", type=Path, metavar="FILE", help="TLS certificate (default: generated for the run)"
    )
    group.add_argument("--tls-key", "--tls_key", type=Path, metavar="FILE", help="private key of that certificate")
    group.add_argument("--no-tls", "--no_tls", action="store_true", help="plain HTTP, even between nodes")
    group.add_argument(
        "--hub-only",
        "--hub_only",
        action="store_true",
        help="be node 0 without a job: hold the run of the other nodes until all of them have finished",
    )
    group.add_argument("--no-hub", "--no_hub", action="store_true", help="no hub: every node keeps its own data")


def run(args: argparse.Namespace) -> int:
    if args.live and args.no_hub:
        raise UsageError("--live needs the hub and cannot be used with --no-hub")
    after_s = seconds_from(os.environ) if args.hang_after is None else args.hang_after
    step = slurm_step(os.environ)
    rank = args.node_rank or ("0" if args.hub_only else "")
    flags = NodeOptions(count=args.nnodes, rank=rank, address=args.master_addr)
    nodes = find_nodes(flags, args.job, os.environ, step, torchrun=args.nproc_per_node is not None)
    if args.hub_only:
        _check_hub_only(args, nodes)
    launches = args.nproc_per_node is not None or starts_ranks(args.job)
    tasks = step is not None and step.tasks > 1 and not launches and not flags.count
    if step is not None and step.tasks_here > 1 and args.nproc_per_node is not None:
        raise UsageError("--nproc-per-node starts all ranks of a node from one task; use `srun --ntasks-per-node 1 …`")
    torchrun = None
    if args.nproc_per_node is not None or (nodes.several and not tasks):
        port = args.master_port or (step.master_port if step is not None else MASTER_PORT)
        torchrun = Torchrun(ranks=args.nproc_per_node, nodes=nodes, port=port, name=args.name or "stepscope")
    if args.hub_only:
        from stepscope.cli.launch.other_nodes import wait_command

        command = wait_command(nodes)
    else:
        command = job_command(args.job, torchrun)
    hub_port = args.hub_port
    if hub_port is None and step is not None and nodes.several:
        hub_port = step.hub_port
    moved = [] if launches or nodes.rank or (step is not None and step.task) else own_options(args.job)
    first = not nodes.rank and (step is None or not step.task)
    watches = first and os.environ.get(ENV_SWITCH) != "0"
    # Once for all three: where the home directory does not respond, each look takes a second.
    configured = watches and are_there_settings(Path.cwd(), (), os.environ)
    alerts = _alerts(args) if watches and (configured or args.alert) else None
    hint = _hint(args.job, moved)
    if moved and not args.quiet and _unread(args.job[0], moved):
        say(hint)
    job = JobOptions(
        command=command,
        root=args.dir,
        name=_name(args.name, command, nodes, step, alone=args.no_hub),
        tags=tuple(args.tag),
        quiet=args.quiet,
        html=not args.no_html,
        on_hang=HangPolicy(after_s=after_s, action=args.on_hang),
        nodes=nodes,
        hub=HubOptions(
            off=args.no_hub,
            only=args.hub_only,
            host=args.hub_host,
            port=hub_port,
            tls=not args.no_tls,
            certificate=args.tls_cert,
            key=args.tls_key,
        ),
        step=step,
        ranks_are_tasks=tasks,
        live=args.live,
        mode=SHARED_WITH.get(args.share, PRIVATE),
        max_disk=args.max_disk,
        native_output=args.native_output,
        layers=args.layers,
        profile=args.profile,
        nvtx=args.nvtx,
        capture=_capture(args.capture),
        alerts=alerts,
        export=_export(args) if watches and (configured or args.to) else ExportOptions(),
        archive=_archive(args) if watches and (configured or args.archive is not None) else None,
        hint=hint,
        team=_team() if watches and (configured or os.environ.get(ENV_TEAM_HUB)) else None,
    )
    return record(job)


def _check_hub_only(args: argparse.Namespace, nodes: Nodes) -> None:
    """UsageError if another option contradicts ``--hub-only``."""
    if args.job or args.nproc_per_node is not None:
        raise UsageError("--hub-only runs no job; start the job on the other nodes")
    if not nodes.several or nodes.rank:
        raise UsageError("--hub-only is for node 0 of several: --nnodes N, the nodes with a job and this one")
    if args.no_hub:
        raise UsageError("--hub-only and --no-hub cannot be used together")


def _export(args: argparse.Namespace) -> ExportOptions:
    """The checked destinations; only the first node exports."""
    from stepscope.integrations.settings import load_export_settings

    settings = load_export_settings(Path.cwd(), args.to, os.environ)
    if args.no_hub and settings.destinations:
        if args.to:
            raise UsageError("--to needs the hub and cannot be used with --no-hub")
        return ExportOptions()
    if not args.quiet:
        for notice in settings.notices:
            say(notice)
    return ExportOptions(words=tuple(each.text for each in settings.destinations), link=settings.link)


def _team() -> TeamHub | None:
    from stepscope.cli.launch.team_hub import load_team_hub

    return load_team_hub(Path.cwd(), os.environ)


def _archive(args: argparse.Namespace) -> ArchiveUrl | None:
    """The checked address; only the first node has the whole run."""
    if args.archive == "off":
        return None
    from stepscope.alerts.settings_files import load_tables
    from stepscope.archive.location import parse_url
    from stepscope.cli.launch.archiving import check_installed

    url = parse_url(args.archive) if args.archive is not None else None
    for table in load_tables("archive", Path.cwd(), os.environ)[0] if url is None else ():
        text = table.text("to")
        table.close()
        if text:
            try:
                url = parse_url(text)
            except UsageError as error:
                table.fail("to", str(error))
    if url is not None:
        check_installed(url)
    return url


def _capture(text: str | None) -> str:
    """The checked words of ``--capture``; empty: as the environment says."""
    if not text:
        return ""
    from stepscope.store.captures import capture_settings

    try:
        capture_settings(text)
    except UsageError as error:
        raise UsageError(f"--capture: {error}") from None
    return text


def _alerts(args: argparse.Namespace) -> AlertSettings:
    """The checked settings; only the first node's hub sends messages."""
    from stepscope.alerts.settings_files import holds_address, load_settings

    settings = load_settings(Path.cwd(), args.alert, os.environ)
    if args.no_hub and args.alert and settings.sends:
        raise UsageError("--alert needs the hub and cannot be used with --no-hub")
    if any(map(holds_address, args.alert)):
        _restart_without(args.alert, args.job)
    if not args.quiet:
        for notice in settings.notices:
            say(notice)
    return settings


def _restart_without(words: Sequence[str], job: Sequence[str]) -> None:
    """Replace this process by the same command with its alerts in the environment, which other users cannot read.

    An address often contains a token, and every user can see the command line of a process as long as it lives.
    """
    ours = sys.argv[1 : len(sys.argv) - len(job)]
    before = len(sys.orig_argv) - len(sys.argv) + 1
    if (
        ours[:1] != ["run"]
        or sys.orig_argv[before:] != sys.argv[1:]
        or sys.argv[len(sys.argv) - len(job) :] != list(job)
    ):
        return  # not started from a shell
    shown = without_option(ours, "--alert")
    environment = {**os.environ, ENV_ALERT: f"{os.environ.get(ENV_ALERT, '')} {shlex.join(words)}".strip()}
    sys.stderr.flush()
    os.execve(sys.executable, [*sys.orig_argv[:before], *shown, *job], environment)


def without_option(words: Sequence[str], option: str) -> list[str]:
    """The words without this option and its value, however written."""
    shown: list[str] = []
    value = False
    for word in words:
        if value or word == option:
            value = not value
        elif not word.startswith(f"{option}="):
            shown.append(word)
    return shown


def own_options(job: Sequence[str]) -> list[list[str]]:
    """Our options among the script's arguments, each with its value."""
    if not any(word.startswith("--") for word in job):
        return []
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    valued = {option: action.nargs != 0 for action in parser._actions for option in action.option_strings}
    found = misplaced_options(job, valued)
    return [words for words in found if not _is_probably_theirs(words)]


def _is_probably_theirs(words: Sequence[str]) -> bool:
    """Many scripts have options --layers, --profile and --nvtx of their own, whose values mean nothing to us."""
    option, equals, value = words[0].partition("=")
    value = value if equals else words[-1]
    if option == "--profile":
        from stepscope.records.capture import parse_schedule

        try:
            parse_schedule(value)
        except ValueError:
            return True
    return option == "--nvtx" or (option == "--layers" and value not in LAYER_MODES)


def _hint(job: Sequence[str], moved: Sequence[Sequence[str]]) -> str:
    """What to write if these options were meant for us, or empty."""
    if not moved:
        return ""
    names = " and ".join(dict.fromkeys(words[0].partition("=")[0] for words in moved))
    line = shlex.join(["stepscope", "run", *(word for words in moved for word in words), *job[: 1 + (job[0] == "-m")]])
    after = "the module" if job[0] == "-m" else job[0]
    return f"options after {after} are passed to it; if you meant Stepscope's {names}: {line} …"


def _unread(script: str, moved: Sequence[Sequence[str]]) -> bool:
    """Whether an option that only we have follows a script that does not mention it, so that it has no effect."""
    names = {words[0].partition("=")[0].lstrip("-").replace("_", "-") for words in moved} & set(ONLY_OURS)
    if not names or not script.endswith(".py"):
        return False
    try:
        text = Path(script).read_text(errors="replace").replace("_", "-")
    except OSError:
        return False
    return not any(name in text for name in names)


def _name(wanted: str | None, command: list[str], nodes: Nodes, step: SlurmStep | None, *, alone: bool) -> str | None:
    """The name of the run; None: named by its time. UsageError if the nodes could not agree on a name."""
    if wanted is not None:
        return wanted
    if step is not None:
        return default_name(command, step.name)
    if nodes.id not in ("", "none"):
        return default_name(command, "".join(c if c.isalnum() or c in "._" else "-" for c in nodes.id))
    if nodes.several and not alone:
        raise UsageError(f"a job on {nodes.count} nodes needs a --name, the same on every node, to identify the run")
    return None


def _tag(text: str) -> str:
    from stepscope.store.catalog import checked_tag

    try:
        return checked_tag(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ranks(text: str) -> str:
    """A number of ranks, or a word that torchrun knows."""
    if text in RANK_WORDS or (text.isascii() and text.isdigit() and int(text) > 0):
        return text
    known = did_you_mean(text, RANK_WORDS)
    raise argparse.ArgumentTypeError(f"must be 1 or more ranks, or cpu, gpu or auto, not {text!r}{known}")


def _on_hang(text: str) -> str:
    """``report``, ``abort`` or a command; a misspelled ``abort`` would only be noticed when the job hangs."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must be report, abort or a command")
    words = (REPORT, ABORT)
    if text not in words and text.isalpha() and nearest(text, words) and shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"must be report, abort or a command, not {text!r}{did_you_mean(text, words)}")
    return text


def _size(text: str) -> int:
    """Bytes: a number, optionally followed by K, M, G or T (powers of 1,024)."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in tuple(_UNITS) else (text, "")
    if not (number.isascii() and number.replace(".", "", 1).isdigit()):
        raise argparse.ArgumentTypeError(f"must be a size such as 10G or 500M, not {text!r}")
    return int(float(number) * (1 << 10 * (_UNITS.find(unit) + 1 if unit else 0)))
