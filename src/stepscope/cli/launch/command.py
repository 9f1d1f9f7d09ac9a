"""What to start: the job's command, its nodes and its Slurm step, from the arguments and the environment."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.cli.arguments import names_in
from stepscope.errors import UsageError
from stepscope.recorder.identity import is_launcher
from stepscope.records.text import did_you_mean

__all__ = [
    "MASTER_PORT",
    "NodeOptions",
    "Nodes",
    "SlurmStep",
    "Torchrun",
    "find_nodes",
    "first_host",
    "hosts_of",
    "job_command",
    "misplaced_options",
    "rank_variables",
    "slurm_step",
    "split_endpoint",
    "split_job",
    "starts_ranks",
    "tasks_by_node",
]


# -- Slurm step -------------------------------------------------------------------------------------------------------
# What Slurm's variables say about the step that ``srun stepscope run …`` belongs to. Pure functions.
#
# Only a step started by srun counts. The shell of ``salloc`` and the script of ``sbatch`` have most of the same
# variables, but run once, on the first node, whatever was allocated. The node list is parsed here because
# ``scontrol show hostnames`` is not available in every container.

NO_TASKS = 0xFFFF_FFF0
"""Step numbers from here on are the batch script, the interactive shell and so on."""
SLURM_MASTER_PORTS = range(10_000, 20_000)
SLURM_HUB_PORTS = range(20_000, 30_000)
"""Below the range that systems use for outgoing connections."""
MOST_HOSTS = 1 << 20

_HOST_LIST = re.compile(r"(?:[^\[\]]|\[[^\[\]]*\])*")
_HOST_LIST_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_TASK_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_HOST_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_SLURM_VARIABLES = {
    "job": ("SLURM_JOB_ID", "SLURM_JOBID"),
    "step": ("SLURM_STEP_ID", "SLURM_STEPID"),
    "nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    "node": ("SLURM_NODEID",),
    "tasks": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "task": ("SLURM_PROCID",),
    "task_here": ("SLURM_LOCALID",),
}
"""For each field the variable that holds it, and its older name."""


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    job: int
    step: int
    restarts: int
    """How often the job was requeued."""
    nodes: int
    node: int
    tasks: int
    task: int
    tasks_here: int
    task_here: int
    first_host: str

    @property
    def name(self) -> str:
        """The same on all nodes and unique to this step."""
        return f"slurm-{self.job}.{self.step}" if self.step else f"slurm-{self.job}"

    @property
    def address(self) -> str:
        """Address of the first rank."""
        return self.first_host if self.nodes > 1 else "127.0.0.1"

    @property
    def master_port(self) -> int:
        return self._port(SLURM_MASTER_PORTS)

    @property
    def hub_port(self) -> int:
        return self._port(SLURM_HUB_PORTS)

    def _port(self, ports: range) -> int:
        """A port that all nodes derive alike, and that the next jobs on the node do not get."""
        return ports[(self.job * 17 + self.step) % len(ports)]


def slurm_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """The step of this task; None outside a step, or if the variables are inconsistent."""
    numbers = {field: _slurm_number(environ, *names) for field, names in _SLURM_VARIABLES.items()}
    known = {field: value for field, value in numbers.items() if value is not None}
    if len(known) < len(numbers) or known["step"] >= NO_TASKS:
        return None
    counts = tasks_by_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    step = SlurmStep(
        **known,
        restarts=_slurm_number(environ, "SLURM_RESTART_COUNT") or 0,
        tasks_here=counts[known["node"]] if known["node"] < len(counts) else 0,
        first_host=first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")),
    )
    return step if step.node < step.nodes and step.task < step.tasks and step.task_here < step.tasks_here else None


def rank_variables(step: SlurmStep, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch needs for a task that is a rank; those that the user has set are kept."""
    variables = {
        "RANK": step.task,
        "WORLD_SIZE": step.tasks,
        "LOCAL_RANK": step.task_here,
        "LOCAL_WORLD_SIZE": step.tasks_here,
        "MASTER_ADDR": step.address,
        "MASTER_PORT": step.master_port,
    }
    return {name: str(value) for name, value in variables.items() if name not in environ}


def tasks_by_node(text: str) -> list[int]:
    """``2(x3),1`` → 2, 2, 2, 1; empty if malformed."""
    counts: list[int] = []
    for piece in text.split(","):
        found = _TASK_COUNT.fullmatch(piece)
        if found is None or len(counts) + int(found[2] or 1) > MOST_HOSTS:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(text: str) -> str:
    """First host of a node list; empty for an empty list."""
    return next(_hosts(text), "")


def hosts_of(text: str) -> list[str]:
    """``gpu[01-04,7],login1`` → gpu01, gpu02, gpu03, gpu04, gpu7, login1; at most ``MOST_HOSTS``."""
    return list(itertools.islice(_hosts(text), MOST_HOSTS))


def _hosts(text: str) -> Iterator[str]:
    if _HOST_LIST.fullmatch(text):  # all brackets are balanced
        for piece in _HOST_LIST_ITEM.findall(text):
            yield from _expanded(piece)


def _expanded(piece: str) -> Iterator[str]:
    """Expand one name with any number of ranges; the last range varies fastest."""
    before, bracket, rest = piece.partition("[")
    if not bracket:
        yield piece
        return
    inside, _, after = rest.partition("]")
    for span in inside.split(","):
        found = _HOST_RANGE.fullmatch(span)
        if found is None:
            return
        width = len(found[1])
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            for end in _expanded(after):
                yield f"{before}{number:0{width}}{end}"


def _slurm_number(environ: Mapping[str, str], *names: str) -> int | None:
    text = next((environ[name] for name in names if name in environ), "")
    return int(text) if text.isascii() and text.isdigit() else None


# -- nodes ------------------------------------------------------------------------------------------------------------
# How many nodes a job has, which one this is, and where the first one is. Pure functions.
#
# Sources for each field, in order: our own flags; the arguments of torchrun or ``accelerate launch``, if one of them
# starts the job; torchrun's variables (``PET_NNODES`` …, set by Kubernetes operators); ``MASTER_ADDR``; Slurm. A job on
# one node is always ``Nodes(count=1, …)``.

_NODE_COUNT = re.compile(r"([1-9]\d{0,6})(?::([1-9]\d{0,6}))?")
_WITHOUT_VALUE = (
    *("--standalone", "--no-python", "--no_python", "--run-path", "--run_path"),
    *("--virtual-local-rank", "--virtual_local_rank", "--use-env", "--use_env"),
)
"""Options of torchrun that take no value; all others do."""
_LAUNCHER_OPTIONS = {
    "nnodes": "count",
    "node_rank": "rank",
    "master_addr": "address",
    "rdzv_endpoint": "endpoint",
    "rdzv_backend": "backend",
    "rdzv_id": "id",
    "num_machines": "count",
    "machine_rank": "rank",
    "main_process_ip": "address",
}
"""Options of torchrun and accelerate."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    count: int = 1
    """The maximum, in an elastic job."""
    least: int = 1
    rank: int = 0
    address: str = ""
    """Address of node 0; empty if unknown, which is allowed on node 0 only."""
    id: str = ""
    """ID of the job at the launcher's rendezvous."""

    @property
    def several(self) -> bool:
        return self.count > 1


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """What one source specifies; empty: nothing."""

    count: str = ""
    rank: str = ""
    address: str = ""
    id: str = ""
    own: bool = True
    """Whether a launcher without a node rank takes this node for the first."""


def find_nodes(
    flags: NodeOptions,
    words: Sequence[str],
    environ: Mapping[str, str],
    slurm: SlurmStep | None,
    *,
    torchrun: bool = False,
) -> Nodes:
    """Determine the nodes of the job; ``torchrun``: whether we start one ourselves.

    Raises UsageError for inconsistent values, or if it is unclear which node this is.
    """
    launcher = starts_ranks(words)
    theirs = node_options_from_words(words) if launcher else NodeOptions()
    torchs = node_options_from_environment(environ) if launcher or torchrun else NodeOptions()
    count_text = flags.count or theirs.count or torchs.count
    # Slurm's allocation applies only if the job spans all of it.
    step = slurm if slurm is not None and (not count_text or _node_range(count_text)[1] == slurm.nodes) else None
    if not count_text:
        count_text = str(step.nodes) if step is not None else "1"
    least, most = _node_range(count_text)
    if most == 1 and flags.rank not in ("", "0"):
        raise UsageError(f"--node-rank {flags.rank} needs --nnodes, the number of nodes")
    if most == 1:
        return Nodes()
    rank_text = flags.rank or theirs.rank or torchs.rank or (str(step.node) if step is not None else "")
    if not rank_text and launcher and theirs.own and torchs.own:
        rank_text = "0"  # torchrun's default
    if not rank_text:
        raise UsageError(f"a job on {count_text} nodes needs --node-rank on every node (0 on the first)")
    if not (rank_text.isascii() and rank_text.isdigit() and int(rank_text) < most):
        raise UsageError(f"--node-rank {rank_text} of {most} nodes: must be from 0 to {most - 1}")
    address = flags.address or theirs.address or torchs.address or environ.get("MASTER_ADDR", "")
    address = address or (step.address if step is not None else "")
    if int(rank_text) and not address:
        raise UsageError(f"node {rank_text} needs the address of node 0; specify --master-addr")
    return Nodes(count=most, least=least, rank=int(rank_text), address=address, id=theirs.id or torchs.id)


def starts_ranks(words: Sequence[str]) -> bool:
    """Whether the arguments of ``stepscope run`` start a launcher of ranks: torchrun, accelerate or similar."""
    if not words:
        return False
    python = re.fullmatch(r"python[\d.]*", os.path.basename(words[0]))  # noqa: PTH119 - a word, maybe no path
    return is_launcher(words if python else ["python", *words])


def node_options_from_words(words: Sequence[str]) -> NodeOptions:
    """Parse the options before the script, which is the first word that is not an option or an option's value."""
    at = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    found: dict[str, str] = {}
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--module", "--"):
        name, equals, value = words[at].partition("=")
        following = words[at + 1] if at + 1 < len(words) else "-"
        takes = not equals and name not in _WITHOUT_VALUE and not following.startswith("-")
        if takes and not following.endswith(".py"):
            value = following
            at += 1
        at += 1
        if meaning := _LAUNCHER_OPTIONS.get(name.lstrip("-").replace("-", "_")):
            found[meaning] = value
    return _node_options(found)


def node_options_from_environment(environ: Mapping[str, str]) -> NodeOptions:
    names = {f"PET_{option.upper()}": meaning for option, meaning in _LAUNCHER_OPTIONS.items()}
    return _node_options({meaning: environ[name] for name, meaning in names.items() if environ.get(name)})


def split_endpoint(endpoint: str) -> str:
    """The host in ``host:port``, ``[2001:db8::1]:29400`` or a bare host."""
    if endpoint.startswith("["):
        return endpoint[1:].partition("]")[0]
    host, colon, port = endpoint.rpartition(":")
    return host if colon and port.isdigit() and ":" not in host else endpoint


def _node_options(found: Mapping[str, str]) -> NodeOptions:
    backend = found.get("backend", "static")
    # An etcd server can be on any host; the other rendezvous backends run on the first node.
    endpoint = "" if backend.startswith("etcd") else split_endpoint(found.get("endpoint", ""))
    count = found.get("count", "")
    return NodeOptions(
        count=count if _NODE_COUNT.fullmatch(count) else "",
        rank=found.get("rank", ""),
        address=endpoint or found.get("address", ""),
        id=found.get("id", ""),
        own=backend == "static",
    )


def _node_range(text: str) -> tuple[int, int]:
    """Parse ``4`` or, for an elastic job, ``1:4``."""
    found = _NODE_COUNT.fullmatch(text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise UsageError(f"--nnodes {text}: must be a number of nodes, or a minimum and a maximum (1:4)")
    return int(found[1]), int(found[2] or found[1])


# -- command line of the job ------------------------------------------------------------------------------------------

MASTER_PORT = 29_500
"""torchrun's default."""


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """The torchrun to put before a script."""

    ranks: str | None = None
    """Ranks per node; None: one, torchrun's default, and the user's command may be a launcher."""
    nodes: Nodes = field(default_factory=Nodes)
    port: int = MASTER_PORT
    name: str = ""
    """Name of the job."""

    @property
    def requested(self) -> bool:
        return self.ranks is not None


def split_job(words: Sequence[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """Split our own arguments from the job's, which begin at ``--``, ``-m`` or the first word that is not an option.

    ``options`` are our options that take a value.
    """
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
        at += 2 if words[at] in options else 1
    return list(words[:at]), list(words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:])


def misplaced_options(words: Sequence[str], options: Mapping[str, bool]) -> list[list[str]]:
    """Stepscope options, each with its value, among the arguments of a script or module; they may be the script's own.

    ``options`` says for each option whether it takes a value. A launcher's options are never ours.
    """
    if not words or not (words[0] == "-m" or words[0].endswith(".py")):
        return []
    rest = list(words[2 if words[0] == "-m" else 1 :])
    rest = rest[: rest.index("--")] if "--" in rest else rest
    found = []
    for at, word in enumerate(rest):
        name, equals, _ = word.partition("=")
        if name in options:
            found.append(rest[at : at + (2 if options[name] and not equals else 1)])
    return found


def job_command(words: Sequence[str], torchrun: Torchrun | None = None) -> list[str]:
    """Command line for a script, ``-m module`` or a launcher with its arguments; UsageError if it cannot be started."""
    if not words:
        raise UsageError("nothing to run; try `stepscope run train.py`")
    first = words[0]
    if first == "-m":
        if len(words) == 1:
            raise UsageError("-m needs the name of a module")
    elif first.endswith(".py"):
        _check_script(Path(first))
    elif torchrun is not None and torchrun.requested:
        raise UsageError(f"--nproc-per-node starts torchrun for a script; use the flags of {first} instead")
    else:
        return [_executable(first), *words[1:]]
    if torchrun is None:
        return [sys.executable, *words]
    if importlib.util.find_spec("torch") is None:
        flag = "--nproc-per-node" if torchrun.requested else "--nnodes"
        raise UsageError(f"{flag} needs torch, which is not installed for {sys.executable}")
    ranks = ["--nproc-per-node", torchrun.ranks or "1"]
    return [sys.executable, "-m", "torch.distributed.run", *_rendezvous_options(torchrun), *ranks, *words]


def _rendezvous_options(torchrun: Torchrun) -> list[str]:
    """Options with which the nodes find each other."""
    nodes = torchrun.nodes
    if not nodes.several:
        return ["--standalone"]  # picks a free port, so that two jobs on one machine do not collide
    if nodes.least < nodes.count:
        host = f"[{nodes.address}]" if ":" in nodes.address else nodes.address or "127.0.0.1"
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{torchrun.port}", "--rdzv-id", torchrun.name]
        return ["--nnodes", f"{nodes.least}:{nodes.count}", *meeting]
    address = ["--master-addr", nodes.address] if nodes.address else []
    where = ["--node-rank", str(nodes.rank), *address, "--master-port", str(torchrun.port)]
    return ["--nnodes", str(nodes.count), *where]


def _check_script(script: Path) -> None:
    if script.is_dir():
        raise UsageError(f"{script} is a folder, not a script")
    if not script.exists():
        where = "" if script.is_absolute() else f" in {Path.cwd()}"
        stems = [name.removesuffix(".py") for name in names_in(script.parent) if name.endswith(".py")]
        raise UsageError(f"no such script: {script}{where}{did_you_mean(script.stem, stems, '{}.py')}")


def _executable(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        hint = f"; a script must end in .py, or be started as `python {name}`" if Path(name).is_file() else ""
        if name.split()[1:] and not hint:
            hint = f"; if this is a command with arguments, leave out the quotes: stepscope run {name}"
        raise UsageError(f"cannot start {name}: not found, or not executable{hint}")
    return found
