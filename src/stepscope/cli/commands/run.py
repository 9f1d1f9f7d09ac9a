"""``stepscope run``: start any training job, unchanged, with the recorder in every rank."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from stepscope.agent.hangs.on_hang import ABORT, REPORT, HangPolicy, seconds_from
from stepscope.cli.arguments import amount, did_you_mean, nearest, port_number
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
from stepscope.cli.launch.helpers import DEFAULT_PORT, HubOptions
from stepscope.cli.launch.record import JobOptions, record
from stepscope.errors import UsageError
from stepscope.records.files import PRIVATE, SHARED_WITH
from stepscope.records.paths import LAYER_MODES
from stepscope.records.text import default_name, say
from stepscope.store.catalog import checked_tag

__all__ = ["add_arguments", "own_options"]

HELP = "run a training script or launcher and record every step"
EPILOG = """\
examples:
  stepscope run train.py --epochs 3
  stepscope run --nproc-per-node 4 train.py
  stepscope run --live train.py
  stepscope run torchrun --nproc-per-node 4 train.py
  stepscope run -m my_package.train --lr 3e-4
  stepscope run accelerate launch train.py
  stepscope run --nnodes 2 --node-rank 0 --master-addr node0 --name big --nproc-per-node 8 train.py
  srun stepscope run train.py

Stepscope's options come before the script; the script and everything after it go to the job.
The exit code is the job's.  STEPSCOPE=0 runs the job without Stepscope.
"""

OPTIONS_BEFORE_JOB = (
    *("--name", "--tag", "--dir", "--nproc-per-node", "--nproc_per_node", "--on-hang", "--hang-after"),
    *("--share", "--max-disk", "--max_disk", "--layers"),
    *("--nnodes", "--node-rank", "--node_rank", "--master-addr", "--master_addr", "--master-port", "--master_port"),
    *("--hub-host", "--hub_host", "--hub-port", "--hub_port", "--tls-cert", "--tls_cert", "--tls-key", "--tls_key"),
)

ONLY_OURS = ("nproc-per-node", "on-hang", "hang-after", "max-disk", "native-output", "hub-host", "hub-port", "no-hub")
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
    group.add_argument("--no-hub", "--no_hub", action="store_true", help="no hub: every node keeps its own data")


def run(args: argparse.Namespace) -> int:
    if args.live and args.no_hub:
        raise UsageError("--live needs the hub and cannot be used with --no-hub")
    after_s = seconds_from(os.environ) if args.hang_after is None else args.hang_after
    step = slurm_step(os.environ)
    flags = NodeOptions(count=args.nnodes, rank=args.node_rank, address=args.master_addr)
    nodes = find_nodes(flags, args.job, os.environ, step, torchrun=args.nproc_per_node is not None)
    launches = args.nproc_per_node is not None or starts_ranks(args.job)
    tasks = step is not None and step.tasks > 1 and not launches and not flags.count
    if step is not None and step.tasks_here > 1 and args.nproc_per_node is not None:
        raise UsageError("--nproc-per-node starts all ranks of a node from one task; use `srun --ntasks-per-node 1 …`")
    torchrun = None
    if args.nproc_per_node is not None or (nodes.several and not tasks):
        port = args.master_port or (step.master_port if step is not None else MASTER_PORT)
        torchrun = Torchrun(ranks=args.nproc_per_node, nodes=nodes, port=port, name=args.name or "stepscope")
    command = job_command(args.job, torchrun)
    hub_port = args.hub_port
    if hub_port is None and step is not None and nodes.several:
        hub_port = step.hub_port
    moved = [] if launches or nodes.rank or (step is not None and step.task) else own_options(args.job)
    hint = _hint(args.job, moved)
    if not args.quiet and _unread(args.job[0], moved):
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
        hint=hint,
    )
    return record(job)


def own_options(job: Sequence[str]) -> list[list[str]]:
    """Our options among the script's arguments, each with its value."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    valued = {option: action.nargs != 0 for action in parser._actions for option in action.option_strings}
    found = misplaced_options(job, valued)
    # Many scripts have an option --layers of their own, with a number.
    return [words for words in found if words[0].partition("=")[0] != "--layers" or _is_layer_mode(words)]


def _is_layer_mode(words: Sequence[str]) -> bool:
    return (words[0].partition("=")[2] or words[-1]) in LAYER_MODES


def _hint(job: Sequence[str], moved: Sequence[Sequence[str]]) -> str:
    """What to write if these options were meant for us; empty if there are none."""
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
