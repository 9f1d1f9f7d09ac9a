"""The window: which steps of which ranks are compared, and which ranks are peers.

All rules use it, live and at the end.  It contains only steps that every live rank has completed.  A rank that ended
(died, raised, returned) is live up to its last step; afterwards the others are compared without it.  Steps that a
running rank has not finished are left out, and so is every step with a lost record.  For an elastic job the last
attempt counts.

Everything is an array over ``[rank, step]``: a rectangle of the run's step table (``step_table.py``), and a view of it
where all ranks made the same steps.  A window over the last n steps is the same with fewer columns: every rule works
on either.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.communication import Communication, build_communication
from stepscope.diagnosis.engine.samples import during, of_kind
from stepscope.judge import thresholds
from stepscope.judge.statistics import mean_rank, spread
from stepscope.records.collectives import ALIKE_KINDS, OPS, GroupKind, ProcessGroup, group_kind, is_data_dimension
from stepscope.records.identity import RankIdentity
from stepscope.records.layers import LayerRecords
from stepscope.records.series import RankSeries, RunData
from stepscope.records.steps import FLAG_CAPTURED, FLAG_COMPILED, FLAG_DISCOVERY, FLAG_FIRST, FLAG_SAMPLED
from stepscope.step_table import Grid, StepTable, join_steps

__all__ = [
    "Apart",
    "Window",
    "build_window",
    "is_pipeline",
    "last_attempt",
    "model_bytes",
    "peer_groups",
    "replicas_of",
    "set_apart",
    "times_the_tokens",
]


# -- peers ------------------------------------------------------------------------------------------------------------
# Ranks that may be compared because they have the same work to do.
#
# The recorder records each rank's peers where DDP or a device mesh defines them (``recorder/process_groups.py``).
# Process groups define them too: ranks of a data-, tensor-, context- or expert-parallel group are peers.  An unnamed
# group (``new_group``, as in Megatron-style loops and DeepSpeed) counts as one if its ranks exchange collectives in
# most steps and hold equally many parameters; the first and last stage that share an embedding do not.
#
# Without any such information all ranks are peers, except pipeline stages.  A pipeline is recognized by its schedule on
# the stack, by the name of a group, or by ranks that send to each other in most steps and hold different numbers of
# parameters (ranks of a ring also send to each other, but hold the same number).

RANKS_AT_MOST = 1 << 24
"""More ranks in a group than any job has: such numbers are not valid."""
ONE_MODEL: tuple[GroupKind, ...] = ("tensor", "context", "pipeline")
"""Groups whose ranks hold parts of one model and train on the same samples."""
POINT_TO_POINT = tuple(OPS.index(op) for op in ("send", "recv"))
COLLECTIVES = tuple(OPS.index(op) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))


def peer_groups(ranks: Sequence[RankSeries]) -> NDArray[np.intp]:
    """[R]; peers have equal numbers, counted from 0 in rank order."""
    told = [_peers_key(series.facts.get("peers")) for series in ranks]
    stages = is_pipeline(ranks)
    if not stages and len(set(told)) <= 1:
        return np.zeros(len(ranks), np.intp)
    joined = _PeerSets(len(ranks))
    first: dict[object, int] = {}
    for row, peers in enumerate(told):
        if peers is not None or not stages:
            joined.join(row, first.setdefault(peers, row))
    rows = {series.rank: row for row, series in enumerate(ranks)}
    for members in _of_process_groups(ranks, rows):
        for row in members[1:]:
            joined.join(members[0], row)
    known: dict[int, int] = {}
    return np.array([known.setdefault(joined.root(row), len(known)) for row in range(len(ranks))], np.intp)


def is_pipeline(ranks: Sequence[RankSeries]) -> bool:
    """Whether the ranks are stages of a pipeline: each continues the work of the one before it."""
    if any(
        series.facts.get("pipeline") is True or _mesh_has(series.facts.get("mesh"), ("pipeline",)) for series in ranks
    ):
        return True
    if any(group.kind == "pipeline" and group.size > 1 for series in ranks for group in series.groups):
        return True
    held = {_parameters(series) for series in ranks}
    return len(held) > 1 and None not in held and all(_in_most_steps(series, POINT_TO_POINT) for series in ranks)


def share_samples(ranks: Sequence[RankSeries]) -> bool:
    """Whether some ranks read the same samples by design, because they hold parts of one model."""
    return is_pipeline(ranks) or _any_has(ranks, ONE_MODEL)


def splits_sequences(ranks: Sequence[RankSeries]) -> bool:
    """Whether some ranks hold parts of one sequence."""
    return _any_has(ranks, ("context",))


def replicas_of(ranks: Sequence[RankSeries]) -> list[list[int]] | None:
    """The ranks of each replica of the model, which train on the same samples; None if that is not clear.

    In plain data parallelism each rank is one replica.  Process groups say which ranks hold parts of one
    model, and a named device mesh must agree with them.
    """
    world = max((series.identity.world_size for series in ranks), default=0)
    if len(ranks) != max(world, 1):
        return None
    joined, rows = _PeerSets(len(ranks)), {series.rank: row for row, series in enumerate(ranks)}
    for series in ranks:
        for group in series.groups:
            if group.size < 2:
                continue
            if group.kind in ONE_MODEL and not any(map(is_data_dimension, group.description.lower().split("_"))):
                members = [rows[rank] for rank in group.ranks if rank in rows]
                if len(members) != group.size:
                    return None
                for row in members[1:]:
                    joined.join(members[0], row)
            elif group.kind == "other" and group.size < world and _in_most_steps(series, COLLECTIVES, group.slot):
                return None
    found: dict[int, list[int]] = {}
    for row, series in enumerate(ranks):
        found.setdefault(joined.root(row), []).append(series.rank)
    replicas = list(found.values())
    return replicas if len(ranks) <= 1 or _is_clear(ranks, len(replicas)) else None


def _is_clear(ranks: Sequence[RankSeries], replicas: int) -> bool:
    """Whether what is known of several ranks agrees with so many replicas."""
    sizes = [_model_parts(series.facts) for series in ranks]
    if any(size is not None and size * replicas != len(ranks) for size in sizes):
        return False
    if replicas < len(ranks):
        return True
    # No parts of a model were found; something must say that the ranks split the data.
    if share_samples(ranks) or len(set(peer_groups(ranks).tolist())) > 1:
        return False
    return all(_splits_data(series) for series in ranks)


def _model_parts(facts: Mapping[str, Any]) -> int | None:
    """Ranks that hold one replica, by the names of the mesh; None without a mesh, 0 if they do not say so."""
    mesh = facts.get("mesh")
    if not isinstance(mesh, dict):
        return None
    names, shape = mesh.get("names"), mesh.get("shape")
    if not names and "fsdp" in facts:
        return None
    if not isinstance(names, list) or not isinstance(shape, list) or not names or len(names) != len(shape):
        return 0
    kinds = [(group_kind(str(name)), int(size)) for name, size in zip(names, shape, strict=True)]
    if any(kind in ("other", "world") and size > 1 for kind, size in kinds):
        return 0
    return math.prod(size for kind, size in kinds if kind in ONE_MODEL)


def _splits_data(series: RankSeries) -> bool:
    facts = series.facts
    loader = facts.get("loader")
    sampled = isinstance(loader, dict) and loader.get("distributed_sampler") is True
    return (
        sampled
        or any(name in facts for name in ("ddp", "fsdp"))
        or any(group.kind == "data" for group in series.groups)
    )


def _any_has(ranks: Sequence[RankSeries], kinds: Sequence[GroupKind]) -> bool:
    """Whether a mesh dimension or a process group is of one of these kinds."""
    if any(_mesh_has(series.facts.get("mesh"), kinds) for series in ranks):
        return True
    return any(group.kind in kinds and group.size > 1 for series in ranks for group in series.groups)


class _PeerSets:
    """Disjoint sets of rows, merged two at a time."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def root(self, row: int) -> int:
        while self._above[row] != row:
            self._above[row] = row = self._above[self._above[row]]
        return row

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.root(one), self.root(other)))
        self._above[high] = low


def _of_process_groups(ranks: Sequence[RankSeries], rows: dict[int, int]) -> Iterator[list[int]]:
    """Rows of each group whose ranks are peers, for the ranks that are present."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for series in ranks:
        for group in series.groups:
            key = (group.name, group.ranks)
            if len(group.ranks) < 2 or group.kind == "world" or key in seen:
                continue
            seen.add(key)
            members = [rows[rank] for rank in group.ranks if rank in rows]
            if group.kind in ALIKE_KINDS or (
                group.kind == "other" and _do_the_same(series, group, [ranks[at] for at in members])
            ):
                yield members


def _do_the_same(series: RankSeries, group: ProcessGroup, members: Sequence[RankSeries]) -> bool:
    """Whether the members of an unnamed group do the same work."""
    held = {_parameters(member) for member in members}
    alike = len(held) == 1 and None not in held
    return (
        alike
        and _in_most_steps(series, COLLECTIVES, group.slot)
        and not _in_most_steps(series, POINT_TO_POINT, group.slot)
    )


def _in_most_steps(series: RankSeries, ops: Sequence[int], slot: int | None = None) -> bool:
    """Whether a rank calls one of these operations in most of its steps, in the group of that slot or in any group."""
    if series.comm is None or not len(series.comm) or not len(series.steps):
        return False
    rows = series.comm[np.isin(series.comm["op"], ops)]
    rows = rows if slot is None else rows[rows["group"] == slot]
    return len(np.unique(rows["step"])) >= thresholds.COMM_STEPS_SHARE * len(np.unique(series.comm["step"]))


def _parameters(series: RankSeries) -> int | None:
    model: Any = series.facts.get("model")
    held = model.get("parameters") if isinstance(model, dict) else None
    return held if isinstance(held, int) else None


def _mesh_has(mesh: Any, kinds: Sequence[GroupKind]) -> bool:
    """Whether a dimension of a device mesh is of one of these kinds."""
    names, shape = (mesh.get("names"), mesh.get("shape")) if isinstance(mesh, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(shape, list):
        return False
    pairs = zip(names, shape, strict=False)
    return any(group_kind(str(name)) in kinds and isinstance(size, int) and size > 1 for name, size in pairs)


def _peers_key(peers: object) -> tuple[tuple[int, ...], ...] | None:
    """The recorded group as a key; None if it is missing, or if its form is not ours."""
    if not isinstance(peers, list) or not peers:
        return None
    runs = []
    for run in peers:
        if not isinstance(run, list) or len(run) != 3 or not all(isinstance(number, int) for number in run):
            return None
        if not 0 <= run[1] <= RANKS_AT_MOST:
            return None
        runs.append(tuple(run))
    return tuple(runs)


# -- expert tokens ----------------------------------------------------------------------------------------------------
# How many tokens the router of a mixture of experts sends to each rank, as far as the all_to_alls show.
#
# Experts on different ranks receive their tokens in one all_to_all and return them in another.  For each, the size of
# the rank's own input is recorded: in the first the tokens it has, in the second those its experts received.  A rank
# whose experts receive more therefore sends more bytes in a step than its peers, and works longer for a reason that is
# neither its data loader nor its machine.
#
# The all_to_alls that send tokens to experts show that its batches are no larger: they have one size on all ranks.

Rows = NDArray[np.intp]
ALL_TO_ALL = OPS.index("all_to_all")


@dataclass(frozen=True, kw_only=True)
class RoutedTokens:
    bytes: NDArray[np.float32]
    """[R, S]; what each rank put into its all_to_alls; nan if unknown."""
    same_batches: bool
    """Whether all ranks have equally many tokens before the router distributes them."""


def routed_bytes(ranks: Sequence[RankSeries], steps: NDArray[np.int64]) -> RoutedTokens | None:
    """None: not all ranks call all_to_all in most of their steps."""
    if len(ranks) < 2 or not len(steps):
        return None
    found = np.full((len(ranks), len(steps)), np.nan, np.float32)
    for row, series in enumerate(ranks):
        if series.comm is None or not (series.comm["op"] == ALL_TO_ALL).any():
            return None
        own = series.comm[series.comm["op"] == ALL_TO_ALL]
        at = np.searchsorted(steps, own["step"].astype(np.int64))
        there = (at < len(steps)) & (steps[np.minimum(at, len(steps) - 1)] == own["step"])
        sums = np.bincount(at[there], own["bytes"][there].astype(np.float64), minlength=len(steps))
        found[row] = np.where(sums > 0, sums, np.nan)
    if (~np.isnan(found)).mean(axis=1).min() < thresholds.COMM_STEPS_SHARE:
        return None
    return RoutedTokens(bytes=found, same_batches=_same_batches(ranks))


def times_the_tokens(routed: RoutedTokens, culprits: Rows, others: Rows, at: slice) -> float:
    """Bytes of the culprits over bytes of the other rows, in the median step; 1: equal, or unknown."""
    if not len(culprits) or not len(others):
        return 1.0
    own, peers = routed.bytes[culprits, at], routed.bytes[others, at]
    known = ~(np.isnan(own).any(axis=0) | np.isnan(peers).any(axis=0))
    if known.sum() < thresholds.MIN_STEPS:
        return 1.0
    return float(np.median(own[:, known].min(axis=0) / np.median(peers[:, known], axis=0)))


def _same_batches(ranks: Sequence[RankSeries]) -> bool:
    """Whether many of the large all_to_alls have one size on all ranks."""
    sizes = [_all_to_all_sizes(series) for series in ranks]
    common = set.intersection(*(set(own) for own in sizes))
    alike = large = 0
    for step in common:
        own = [of_rank[step] for of_rank in sizes]
        if len({len(one) for one in own}) > 1:
            continue
        calls = np.array(own, np.float64)
        most = calls.max(axis=0)
        counted = most >= thresholds.SMALL_EXCHANGE_SHARE * most.max()
        large += int(counted.sum())
        alike += int((counted & (calls.min(axis=0) * thresholds.BYTES_ALIKE >= most)).sum())
    return large > 0 and alike >= thresholds.SAME_SIZE_SHARE * large


def _all_to_all_sizes(series: RankSeries) -> dict[int, list[int]]:
    """Sizes by step, in call order, of the all_to_alls that were recorded individually."""
    found: dict[int, list[int]] = {}
    if series.collectives is None:
        return found
    own = series.collectives[series.collectives["op"] == ALL_TO_ALL]
    for step, size in zip(own["step"].tolist(), own["bytes"].tolist(), strict=True):
        found.setdefault(step, []).append(size)
    return found


# -- exchanges of the whole model -------------------------------------------------------------------------------------
# In which steps the ranks exchange as much as their gradients or weights: in nearly all of them (data parallelism), now
# and then (Local SGD: each rank trains alone, and the weights are averaged every few steps), or never.

COMBINING = (*COLLECTIVES, *(OPS.index(op) for op in ("broadcast", "reduce")))
DTYPE_BYTES = {"float64": 8, "bfloat16": 2, "float16": 2}
"""Of a parameter, unless it has 4."""


def exchanged_bytes(ranks: Sequence[RankSeries], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """[S]; what collectives combined in a step, DDP's own included, on the rank with the most."""
    most = np.zeros(len(steps))
    for series in ranks if len(steps) else ():
        if series.comm is None and "ddp_comm_ns" not in series.steps.table.plain:
            continue
        found = np.zeros(len(steps))
        if series.comm is not None and len(series.comm):
            own = series.comm[np.isin(series.comm["op"], COMBINING)]
            _add_at(found, steps, own["step"].astype(np.int64), own["bytes"].astype(np.float64))
        synced = series.steps["step"][series.steps["ddp_comm_ns"] > 0]
        _add_at(found, steps, synced, np.full(len(synced), model_bytes(series.facts) or 1.0))
        most = np.maximum(most, found)
    return most


def _add_at(
    found: NDArray[np.float64], steps: NDArray[np.int64], at: NDArray[np.int64], values: NDArray[np.float64]
) -> None:
    place = np.minimum(np.searchsorted(steps, at), len(steps) - 1)
    there = steps[place] == at
    np.add.at(found, place[there], values[there])


def model_bytes(facts: Mapping[str, Any]) -> float:
    """Size of a rank's parameters; 0: unknown."""
    model: Any = facts.get("model")
    count = model.get("parameters") if isinstance(model, dict) else None
    return float(count * DTYPE_BYTES.get(str(model.get("dtype")), 4)) if isinstance(count, int) else 0.0


# -- window -----------------------------------------------------------------------------------------------------------

Reason = Literal["first", "compile", "capture", "discovery", "warm-up"]
_ENDED = ("exited", "exception", "vanished")


@dataclass(frozen=True, kw_only=True)
class Apart:
    """A step that does not count as steady."""

    step: int
    reason: Reason


@dataclass(frozen=True, kw_only=True)
class Window:
    """R ranks, S steps, P phases: a rectangle of the run's step table.  Only phases with any time are included."""

    wall_ns: NDArray[np.float64]
    """[R, S]; nan where a rank had ended, here and below."""
    phase_ns: NDArray[np.float64]
    """[P, R, S]; host time; sums to ``wall_ns``."""
    device_ns: NDArray[np.float64] | None
    """[P, R, S]; device time between the phase's marks, also nan where it was not recorded; None if never recorded."""
    between_ns: NDArray[np.float64]
    """[R, S]; the part of phase ``other`` that lies between two steps."""
    allocated: NDArray[np.float64]
    """[R, S]; bytes of the device's allocator in use at the end of the step; nan where not sampled."""
    reserved: NDArray[np.float64]
    """[R, S]; bytes the allocator holds, used or not."""
    peak_allocated: NDArray[np.float64]
    """[R, S]; the most bytes in use since the process began, also within steps.  Where it is higher than at the last
    read, the peak was in the steps between the two; elsewhere a step's own peak is unknown."""
    end_wall_ns: NDArray[np.float64]
    """[R, S]; when the step ended, by the clock of the rank's machine (to a quarter of a microsecond)."""
    flags: NDArray[np.uint16]
    """[R, S]; 0 where a rank had ended."""
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """By rank, in the order of ``ranks``."""
    attempt: int
    steps: NDArray[np.int64]
    """Step numbers, ascending."""
    phases: tuple[str, ...]
    warmup: tuple[Apart, ...]
    """Steps set aside, ascending."""
    left_out: int
    """Steps recorded by some rank that are not in the window."""
    identities: tuple[RankIdentity, ...]
    """By rank, in the order of ``ranks``; so are the facts and the groups."""
    facts: tuple[dict[str, Any], ...]
    ddp_ns: tuple[NDArray[np.float64], ...]
    """By rank, how long DDP reports that computing the gradients took, whenever it did."""
    groups: NDArray[np.intp]
    """[R]; ranks with the same number have the same work to do and may be compared."""
    stages: bool
    """Whether the ranks are stages of a pipeline; ranks of different groups then do different work."""
    share_samples: bool
    """Whether some ranks read the same samples by design, because they hold parts of one model."""
    batches: NDArray[np.float64]
    """[R]; batches per step, in the median step; 1 without gradient accumulation, 0: unknown."""
    backwards: NDArray[np.int64]
    """[S]; backward passes in a step, on the rank with the most; 0: none was recorded."""
    forwards: NDArray[np.int64]
    """[S]; likewise, calls of models with gradients."""
    splits_sequences: bool
    """Whether some ranks hold parts of one sequence (context parallelism)."""
    exchanged_bytes: NDArray[np.float64]
    """[S]; what collectives combined in a step, DDP's own included, on the rank with the most."""
    routed: RoutedTokens | None
    """What the router of a mixture of experts sent to each rank; None: no router, or unknown."""
    samples: tuple[dict[str, Any], ...]
    """The agents' samples of hosts, processes and GPUs while these steps ran."""
    probes: tuple[dict[str, Any], ...]
    """The agents' network probes, over several minutes at least: network faults take a while to show."""
    stacks: tuple[dict[str, Any], ...]
    earlier_stacks: tuple[dict[str, Any], ...]
    """Stacks from before these steps: a rank whose steps do not change is not sampled again."""
    communication: Communication | None
    """What the ranks exchanged; None: there is one rank, or no exchange was recorded."""
    layers: LayerRecords
    """Samples of the whole attempt: they are rare, and what is wrong shows against earlier ones."""

    @cached_property
    def lines(self) -> dict[object, list[dict[str, Any]]]:
        """The samples by kind."""
        found: dict[object, list[dict[str, Any]]] = defaultdict(list)
        for line in self.samples:
            kind = line.get("kind")
            found[kind if kind.__class__ is str else None].append(line)
        return dict(found)

    @cached_property
    def rows_of_host(self) -> dict[object, list[int]]:
        found: dict[object, list[int]] = {}
        for row, host in enumerate(self.hosts):
            found.setdefault(host, []).append(row)
        return found

    @cached_property
    def steady(self) -> NDArray[np.bool_]:
        """[S]; all but the steps set aside."""
        return _steady(self.steps, self.warmup)

    @cached_property
    def unsampled(self) -> NDArray[np.bool_]:
        """[S]; steady steps in which no rank looked at its layers (that takes time); otherwise all of them."""
        plain = self.steady & ~((self.flags & FLAG_SAMPLED) > 0).any(axis=0)
        return plain if plain.any() else self.steady

    @cached_property
    def begin_wall_ns(self) -> NDArray[np.float64]:
        """[R]; when a rank's first step began; nan without any."""
        return np.asarray(np.fmin.reduce(self.end_wall_ns - self.wall_ns, axis=1, initial=np.nan), np.float64)

    @cached_property
    def last_wall_ns(self) -> NDArray[np.float64]:
        """[R]; when a rank's last step ended."""
        return np.asarray(np.fmax.reduce(self.end_wall_ns, axis=1, initial=np.nan), np.float64)

    @cached_property
    def apart_wall_ns(self) -> tuple[tuple[NDArray[np.float64], NDArray[np.float64]], ...]:
        """[R] each; begin and end of each stretch of steps set aside; nan for ranks that had ended."""
        at = np.flatnonzero(~self.steady)
        found = []
        for stretch in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(at) else ():
            ends = self.end_wall_ns[:, stretch]
            begins = ends - self.wall_ns[:, stretch]
            found.append((np.fmin.reduce(begins, axis=1), np.fmax.reduce(ends, axis=1)))
        return tuple(found)


def last_attempt(ranks: Sequence[RankSeries]) -> list[RankSeries]:
    """The processes of the last attempt, by rank."""
    last = max((series.identity.attempt for series in ranks), default=0)
    return sorted((series for series in ranks if series.identity.attempt == last), key=lambda series: series.rank)


def build_window(run: RunData, *, last: int | None = None) -> Window:
    """Build the window over all steps, or over the ``last`` n."""
    current = last_attempt(run.ranks)
    trained = [series for series in current if len(series.steps)]
    table = join_steps([series.steps for series in trained])
    steps, alive, seen = _complete_steps(trained, table)
    if last is not None and last < len(steps):
        seen -= len(steps) - last
        steps, alive = steps[-last:], None if alive is None else alive[:, -last:]
        if alive is not None and not alive.any(axis=1).all():
            there = np.asarray(alive.any(axis=1))  # without the ranks that had ended before the window began
            trained, alive = [series for series, keep in zip(trained, there, strict=True) if keep], alive[there]
            table = join_steps([series.steps for series in trained])
    grid = Grid(table, steps, alive)
    wall_ns, flags = grid(table.column("wall_ns")), grid(table.column("flags"), 0)
    phases, phase_ns, device_ns = _phases(table, grid)
    end_wall_ns = _end_wall_ns(trained, grid(table.column("start_ns").astype(np.float64)), wall_ns)
    begins, ends = _period(end_wall_ns, wall_ns)
    warmup, groups = set_apart(steps, wall_ns, flags), peer_groups(trained)
    comm_ns = phase_ns[phases.index("comm")] if "comm" in phases else np.zeros(grid.shape)
    ddp_ns = grid(table.column("ddp_comm_ns"), 0), grid(table.column("ddp_compute_ns"), 0)
    return Window(
        wall_ns=wall_ns,
        phase_ns=phase_ns,
        device_ns=device_ns,
        between_ns=grid(table.column("between_ns")),
        **{name: _memory(table, grid, name) for name in ("allocated", "reserved", "peak_allocated")},
        end_wall_ns=end_wall_ns,
        flags=flags,
        ranks=tuple(series.rank for series in trained),
        hosts=tuple(series.identity.host for series in trained),
        attempt=current[0].identity.attempt if current else 0,
        steps=steps,
        phases=phases,
        warmup=warmup,
        left_out=seen - len(steps),
        identities=tuple(series.identity for series in trained),
        facts=tuple(series.facts for series in trained),
        ddp_ns=_ddp_samples(table, steps),
        groups=groups,
        stages=is_pipeline(trained),
        share_samples=share_samples(trained),
        batches=_batches(table),
        backwards=grid(table.column("micro_batches"), 0).max(axis=0, initial=0).astype(np.int64),
        forwards=grid(table.column("forwards"), 0).max(axis=0, initial=0).astype(np.int64),
        splits_sequences=splits_sequences(trained),
        exchanged_bytes=exchanged_bytes(trained, steps),
        routed=routed_bytes(trained, steps),
        samples=tuple(during(run.samples, begins, ends)),
        probes=_probes(run, begins, ends),
        stacks=tuple(during(run.stacks, begins, ends)),
        earlier_stacks=tuple(during(run.stacks, _attempt_began_ns(current), begins - 1)),
        communication=build_communication(trained, steps, _steady(steps, warmup), comm_ns, ddp_ns, groups),
        layers=_layers_of(run, current[0].identity.attempt if current else 0),
    )


def _attempt_began_ns(current: Sequence[RankSeries]) -> int:
    return min((series.anchor_wall_ns for series in current), default=0)


def _phases(table: StepTable, grid: Grid) -> tuple[tuple[str, ...], NDArray[np.float64], NDArray[np.float64] | None]:
    """The phases with any time in these steps, and their times on the host and on the device."""
    phase_ns = grid(table.phase_ns)
    device_ns = None if table.device_ns is None else grid(table.device_ns)
    used = _used(phase_ns)
    if device_ns is not None:
        used |= _used(device_ns)  # on NCCL the device waits, never the host
    if used.all():
        return table.phases, phase_ns, device_ns
    names = tuple(name for name, keep in zip(table.phases, used, strict=True) if keep)
    return names, phase_ns[used], None if device_ns is None else device_ns[used]


def _memory(table: StepTable, grid: Grid, name: str) -> NDArray[np.float64]:
    if name not in table.plain:
        return np.broadcast_to(np.float64(np.nan), grid.shape)  # takes no memory
    levels = grid(table.column(name))
    return np.where(levels > 0, levels, np.nan)


def _end_wall_ns(
    trained: Sequence[RankSeries], start_ns: NDArray[np.float64], wall_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
    offsets = np.array([series.anchor_wall_ns - series.anchor_mono_ns for series in trained], np.float64)
    return start_ns + wall_ns + offsets[:, None]


def _layers_of(run: RunData, attempt: int) -> LayerRecords:
    own, trails = (
        tuple(sample for sample in samples if sample.attempt == attempt)
        for samples in (run.layers.samples, run.layers.trails)
    )
    return LayerRecords(models=run.layers.models, samples=own, trails=trails)


def _period(end_wall_ns: NDArray[np.float64], wall_ns: NDArray[np.float64]) -> tuple[float, float]:
    """From the start of the first step to the end of the last, on the wall clock; start-up is excluded."""
    if not wall_ns.size:
        return 0.0, 0.0
    return float(np.nanmin(end_wall_ns - wall_ns)), float(np.nanmax(end_wall_ns))


def _probes(run: RunData, begins: float, ends: float) -> tuple[dict[str, Any], ...]:
    lines = of_kind(run.samples, "probe")
    since = min(begins, ends - thresholds.PROBES_BACK_S * 1e9)
    return tuple(during(lines, since, ends + thresholds.PROBES_AFTER_S * 1e9))


def _ddp_samples(table: StepTable, steps: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
    if not len(steps) or "ddp_compute_ns" not in table.plain:
        return (np.zeros(0),) * table.ranks
    took_ns = table.column("ddp_compute_ns")
    known = (took_ns > 0) & (table.step >= steps[0])
    rows = (slice(begin, end) for begin, end in pairwise(table.first.tolist()))
    return tuple(took_ns[own][known[own]] for own in rows)


def _batches(table: StepTable) -> NDArray[np.float64]:
    """Batches per step; in a loop without a DataLoader, backward passes: as many, unless there are several models."""
    taken = table.medians("batches")
    return np.where(taken > 0, taken, table.medians("micro_batches"))


def _complete_steps(
    trained: Sequence[RankSeries], table: StepTable
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None, int]:
    """The steps to compare, which ranks were alive in them [R, S] (None: all), and how many steps any rank recorded."""
    if not trained:
        return np.zeros(0, np.int64), None, 0
    shared = table.shared_steps()
    if shared is not None:
        return shared, None, len(shared)
    numbers = [series.steps["step"] for series in trained]
    universe = np.unique(table.step)
    have = np.stack([np.isin(universe, own, assume_unique=True) for own in numbers])
    alive = np.ones_like(have)
    complete = np.ones(len(universe), np.bool_)
    for index, (series, own) in enumerate(zip(trained, numbers, strict=True)):
        if series.state in _ENDED:
            alive[index] = universe <= own[-1]
        else:
            complete &= universe <= own[-1]
    complete &= (have | ~alive).all(axis=0)
    return universe[complete], alive[:, complete], len(universe)


def _steady(steps: NDArray[np.int64], warmup: Sequence[Apart]) -> NDArray[np.bool_]:
    return ~np.isin(steps, [apart.step for apart in warmup])


def _used(phase_ns: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.array([bool((plane > 0).any()) for plane in phase_ns], np.bool_)


def set_apart(steps: NDArray[np.int64], wall_ns: NDArray[np.float64], flags: NDArray[np.uint16]) -> tuple[Apart, ...]:
    """Set apart the first step, compile steps and captured ones anywhere, and leading steps not yet like the rest.

    ``wall_ns`` and ``flags`` are [R, S].
    """
    if not len(steps):
        return ()
    any_flag = np.bitwise_or.reduce(flags, axis=0)
    reasons: list[Reason | None] = [None] * len(steps)
    for index in range(len(steps)):
        if any_flag[index] & FLAG_FIRST:
            reasons[index] = "first"
        elif any_flag[index] & FLAG_COMPILED:
            reasons[index] = "compile"
        elif any_flag[index] & FLAG_CAPTURED:
            reasons[index] = "capture"
    length_ns = mean_rank(wall_ns)
    at_most = int(len(steps) * thresholds.WARMUP_AT_MOST)
    rest = length_ns[at_most:][[reason is None for reason in reasons[at_most:]]]
    typical = float(np.median(rest)) if len(rest) else float("inf")
    limit = typical + max(thresholds.WARMUP_SPREADS * spread(rest), thresholds.WARMUP_SHARE * typical)
    for index in range(len(steps)):
        if reasons[index] is not None:
            continue
        if any_flag[index] & FLAG_DISCOVERY:
            reasons[index] = "discovery"
        elif index < at_most and length_ns[index] > limit:
            reasons[index] = "warm-up"
        else:
            break
    return tuple(
        Apart(step=int(step), reason=reason) for step, reason in zip(steps, reasons, strict=True) if reason is not None
    )
