"""What a sampled step shows of the model's layers: their time, memory, gradients and checksums.

The recorder writes two kinds of lines to ``PID.layers`` next to its ring, and the agent moves them to ``layers.jsonl``:
a *model* (the tree of modules; once, and again when the model changes) and a *sample* for each sampled step.  All lists
of a sample have one entry for each module of its model, in the same order; null where nothing is known.  A module's
bytes, norms and checksum are those of the parameters that it owns itself, without its children; ``forward_us`` is the
whole call, children included.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepscope.records.throughput import Work, read_work

__all__ = [
    "FIRST_SHARED_STEP",
    "MEMORY_KINDS",
    "SHARED_STEPS",
    "LayerRecords",
    "LayerSample",
    "MemoryAccount",
    "ModelTree",
    "ModuleInfo",
    "TensorGroup",
    "layer_lines",
    "plain_numbers",
    "read_layers",
    "read_memory",
]

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")
SHARED_STEPS = 100
FIRST_SHARED_STEP = 37
"""Every rank samples at the second plus multiples of the first, or of the first times a power of two: so ranks have
steps in common.  They are no round numbers, because loops log, evaluate and save at those, and such a step would say
little about the others."""
MOST_MODULES = 20_000
MOST_TEXT = 512
MOST_ROWS = 512
_SNAPSHOT = re.compile(r"memory/rank_\d{1,9}\.pickle")
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleInfo:
    name: str
    """As in ``named_modules()``: ``layers.7.mlp``; empty for the model itself."""
    type: str
    """The name of its class."""
    parent: int
    """Index of the module that contains it; -1 for the model itself.  Parents come before their children."""
    elements: int
    """Of the parameters that it owns itself (the local shard, if they are sharded)."""
    trainable: int
    """Of these, elements that require gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTree:
    id: str
    """A hash of names, types and shapes: ranks with equal models have equal ids."""
    modules: tuple[ModuleInfo, ...]
    compiled: bool
    """Modules inside a compiled region are not timed, and their activations are unknown."""
    replicated: bool
    """Every rank of the data-parallel group holds all parameters: their checksums must be equal after each step."""

    def label(self, index: int) -> str:
        """The name of a module; the class for the model itself, which has no name."""
        return self.modules[index].name or self.modules[index].type


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSample:
    rank: int
    attempt: int
    step: int
    wall_ns: int
    model: str
    """Id of the model."""
    clock: str
    """Which clock timed the layers: ``host`` or ``device``."""
    group: str
    """Ranks with the same group hold the same replica: ``""`` for plain data parallelism, else the coordinates of the
    other dimensions (``tp=1,pp=0``)."""
    forward_us: tuple[float | None, ...]
    backward_us: tuple[float | None, ...]
    """Of the module's own backward; only modules without children have it."""
    host_forward_us: tuple[float | None, ...] = ()
    host_backward_us: tuple[float | None, ...] = ()
    """What the host took to start the work, where the other two are the device's; else empty or all None."""
    memory: Mapping[str, tuple[int, ...]]
    """Bytes by kind (``MEMORY_KINDS``)."""
    grad_norm: tuple[float | None, ...]
    """``inf`` or ``nan`` if the gradients are; None: no gradients."""
    weight_norm: tuple[float | None, ...]
    update_ratio: tuple[float | None, ...]
    """Size of the optimizer's change relative to the weights, estimated from a part of each parameter."""
    zero_share: tuple[float | None, ...]
    """Share of gradient elements that are exactly zero."""
    checksum: tuple[str | None, ...]
    """Of the bits of the parameters after the step; equal bits give equal sums in any order."""
    nonfinite_forward: int | None
    """The first module, in order of execution, whose output was NaN or infinite although its inputs were finite."""
    nonfinite_backward: int | None
    """The first module, in order of the backward pass, that received such a gradient; before any exchange of ranks."""
    skipped: bool
    """The gradient scaler skipped the step because of infinite gradients, which is normal now and then."""
    device_peak: int | None
    """The allocator's own: the most since the process began, or since the script reset it; None without a GPU."""
    device_bytes: int | None
    """In use by the allocator at the end of the step."""
    peaks: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    """By phase (``forward``, ``backward``, ``optimizer``): the most bytes in use, added up from sizes, and the module
    that was at work."""
    out_of_memory: bool = False
    """Not a sample: what the layers held when the process ran out of memory in this step.  Only ``memory`` is known,
    and activations are those of the last sample."""
    work: Work | None = None
    """How much this rank did in this step."""
    trail: bool = False
    """Not a sample: norms that were kept of the last steps (``recorder/layers/gradient_trail.py``), of one from which
    on they are not finite.  Only the norms are known; ``weight_norm`` is of weights before the update."""
    good_step: int | None = None
    """The last step before it of which all gradients were looked at and finite."""
    good_some_step: int | None = None
    """The same, if a few gradients are enough."""
    local_norm: tuple[float | None, ...] = ()
    """Like ``grad_norm``, of this rank alone, before any exchange."""
    own_norm: float | None = None
    """The norm of some gradients of this rank alone, which are not known by module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRecords:
    models: Mapping[str, ModelTree]
    samples: tuple[LayerSample, ...]
    """In order of step and rank; each refers to one of the models."""
    at_failure: tuple[LayerSample, ...] = ()
    """What the layers of ranks held that ran out of memory; in the same order."""
    trails: tuple[LayerSample, ...] = ()
    """Norms of steps that were not sampled, from which on they are not finite; in the same order."""

    def __bool__(self) -> bool:
        return bool(self.samples or self.at_failure or self.trails)

    @property
    def of_memory(self) -> tuple[LayerSample, ...]:
        """Everything that says what layers hold, in order of attempt, step and rank."""
        if not self.at_failure:
            return self.samples
        return tuple(
            sorted((*self.samples, *self.at_failure), key=lambda sample: (sample.attempt, sample.step, sample.rank))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Live tensors of one dtype and shape."""

    count: int
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    kind: str
    """One of ``MEMORY_KINDS``, or ``other``."""
    where: str
    """The module that owns one of them, or the container or variable that keeps it; empty if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAccount:
    """What a process held when it ran out of memory (``memory`` in ``errors/PID.json``)."""

    device: str
    """``cuda`` or ``cpu``: the memory that ran out."""
    kinds: Mapping[str, int]
    """Bytes by kind; activations are missing if they are not known."""
    activations_step: int | None
    """The sampled step that they are from."""
    modules: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, class and bytes by kind (as in ``MEMORY_KINDS``) of the modules that hold most themselves."""
    tensors: tuple[TensorGroup, ...]
    """The largest groups first."""
    tensor_bytes: int
    """Of all tensors that Python knows: not of those that only the autograd graph holds."""
    process: Mapping[str, int]
    """``VmRSS`` … of the kernel, and ``limit`` on the address space."""
    allocated: int | None
    allocated_peak: int | None
    reserved: int | None
    """Of CUDA's allocator, when the error was handled."""
    snapshot: str | None
    """The file of the run in which the allocator's state is."""
    snapshot_problem: str
    """Why there is no snapshot."""


def read_memory(raw: Any) -> MemoryAccount | None:
    """Return what ``memory`` of an error says; None if it is missing or invalid."""
    if not isinstance(raw, Mapping) or raw.get("device") not in ("cuda", "cpu"):
        return None
    kinds, process = _counts(raw.get("kinds")), _counts(raw.get("process"))
    allocator = raw.get("allocator")
    allocator = allocator if isinstance(allocator, Mapping) else {}
    allocated, reserved = (_counts(allocator.get(name)) for name in ("allocated_bytes", "reserved_bytes"))
    step, tensor_bytes, snapshot = (raw.get(name) for name in ("activations_step", "tensor_bytes", "snapshot"))
    modules, tensors = (raw.get(name) for name in ("modules", "tensors"))
    return MemoryAccount(
        device=raw["device"],
        kinds={kind: kinds[kind] for kind in MEMORY_KINDS if kind in kinds},
        activations_step=step if _is_count(step) else None,
        modules=tuple(filter(None, map(_module_sizes, modules[:MOST_ROWS]))) if isinstance(modules, list) else (),
        tensors=tuple(filter(None, map(_group, tensors[:MOST_ROWS]))) if isinstance(tensors, list) else (),
        tensor_bytes=tensor_bytes if type(tensor_bytes) is int and tensor_bytes >= 0 else 0,
        process=process,
        allocated=allocated.get("current"),
        allocated_peak=allocated.get("peak"),
        reserved=reserved.get("current"),
        snapshot=snapshot if isinstance(snapshot, str) and _SNAPSHOT.fullmatch(snapshot) else None,
        snapshot_problem=_text(raw.get("snapshot_problem")),
    )


def _counts(raw: Any) -> dict[str, int]:
    if not isinstance(raw, Mapping):
        return {}
    return {str(name)[:MOST_TEXT]: value for name, value in list(raw.items())[:MOST_ROWS] if _is_count(value)}


def _module_sizes(row: Any) -> tuple[str, str, tuple[int, ...]] | None:
    if not isinstance(row, list) or len(row) != 3 or not all(isinstance(text, str) for text in row[:2]):
        return None
    sizes = row[2]
    if not isinstance(sizes, list) or len(sizes) != len(MEMORY_KINDS) or not all(map(_is_count, sizes)):
        return None
    return row[0][:MOST_TEXT], row[1][:MOST_TEXT], tuple(sizes)


def _group(raw: Any) -> TensorGroup | None:
    if not isinstance(raw, Mapping) or not (_is_count(raw.get("count")) and _is_count(raw.get("bytes"))):
        return None
    shape, kind = raw.get("shape"), raw.get("kind")
    if not isinstance(shape, list) or len(shape) > MOST_TEXT or not all(map(_is_count, shape)):
        return None
    return TensorGroup(
        count=raw["count"],
        dtype=_text(raw.get("dtype")),
        shape=tuple(shape),
        bytes=raw["bytes"],
        kind=kind if kind in MEMORY_KINDS else "other",
        where=_text(raw.get("where")),
    )


def read_layers(records: Iterable[Mapping[str, Any]]) -> tuple[LayerRecords, int]:
    """Return what parsed lines of ``layers.jsonl`` say, and the number of lines that are invalid."""
    models: dict[str, ModelTree] = {}
    found: list[LayerSample] = []
    bad = 0
    for record in records:
        kind = record.get("kind")
        model = _model(record) if kind == "model" else None
        if model is not None:
            models.setdefault(model.id, model)
            continue
        tree = models.get(str(record.get("model"))) if kind == "sample" else None
        sample = None if tree is None else _sample(record, len(tree.modules))
        if sample is None:
            bad += 1
        else:
            found.append(sample)
    # What an agent had just read when it was killed, the next one may have read again.
    once = {
        (sample.attempt, sample.step, sample.rank, sample.model, sample.trail): sample for sample in reversed(found)
    }
    ordered = [once[key] for key in sorted(once)]
    trails = tuple(sample for sample in ordered if sample.trail)
    samples = tuple(sample for sample in ordered if not sample.out_of_memory and not sample.trail)
    at_failure = tuple(sample for sample in ordered if sample.out_of_memory and not sample.trail)
    return LayerRecords(models=models, samples=samples, at_failure=at_failure, trails=trails), bad


def layer_lines(records: LayerRecords) -> Iterator[dict[str, Any]]:
    """The lines that ``read_layers`` reads, for models and samples that no longer are as a recorder wrote them."""
    for model in records.models.values():
        rows = [
            [module.name, module.type, module.parent, module.elements, module.trainable] for module in model.modules
        ]
        flags = {"compiled": model.compiled, "replicated": model.replicated}
        yield {"kind": "model", "model": model.id, **flags, "modules": rows}
    for sample in (*records.of_memory, *records.trails):
        document: dict[str, Any] = {
            "rank": sample.rank,
            "attempt": sample.attempt,
            "kind": "sample",
            "step": sample.step,
        }
        document |= {name: getattr(sample, name) for name in ("wall_ns", "model", "clock", "group", "skipped")}
        document["memory"] = {name: sizes for name, sizes in sample.memory.items() if any(sizes)}
        for name in _FLOATS:
            values = getattr(sample, name)
            if any(value is not None for value in values):
                document[name] = plain_numbers(values)
        if any(value is not None for value in sample.checksum):
            document["checksum"] = sample.checksum
        document |= {name: value for name in _PLAIN if (value := getattr(sample, name)) is not None}
        if sample.peaks:
            document["peaks"] = sample.peaks
        if sample.out_of_memory:
            document["out_of_memory"] = True
        if sample.trail:
            document["trail"] = True
        if sample.own_norm is not None:
            document["own_norm"] = plain_numbers([sample.own_norm])[0]
        if sample.work is not None:
            document["work"] = sample.work.plain()
        yield document


# -- lines ------------------------------------------------------------------------------------------------------------
# They may come from another node or from a damaged file: everything is checked.


def _model(raw: Mapping[str, Any]) -> ModelTree | None:
    identity, rows = raw.get("model"), raw.get("modules")
    if not isinstance(identity, str) or not isinstance(rows, list) or not 0 < len(rows) <= MOST_MODULES:
        return None
    modules = []
    for at, row in enumerate(rows):
        module = _module(row, at)
        if module is None:
            return None
        modules.append(module)
    return ModelTree(
        id=identity[:MOST_TEXT],
        modules=tuple(modules),
        compiled=raw.get("compiled") is True,
        replicated=raw.get("replicated") is True,
    )


def _module(row: Any, at: int) -> ModuleInfo | None:
    """``[name, type, parent, elements, trainable]``."""
    if not isinstance(row, list) or len(row) != 5 or not all(isinstance(text, str) for text in row[:2]):
        return None
    parent, elements, trainable = row[2:]
    if not (type(parent) is int and -1 <= parent < at) or not (_is_count(elements) and _is_count(trainable)):
        return None
    name, kind = (text[:MOST_TEXT] for text in row[:2])
    return ModuleInfo(name=name, type=kind, parent=parent, elements=elements, trainable=trainable)


def _sample(raw: Mapping[str, Any], modules: int) -> LayerSample | None:
    if not all(_is_count(raw.get(name)) for name in ("rank", "step", "wall_ns")):
        return None
    lists = {name: _numbers(raw.get(name), modules) for name in _FLOATS}
    memory = raw.get("memory")
    memory = memory if isinstance(memory, Mapping) else {}
    bytes_of = {name: tuple(map(_bytes, _numbers(memory.get(name), modules))) for name in MEMORY_KINDS}
    sums = raw.get("checksum")
    sums = sums if isinstance(sums, list) and len(sums) == modules else [None] * modules
    attempt = raw.get("attempt")
    return LayerSample(
        rank=raw["rank"],
        attempt=attempt if type(attempt) is int and 0 <= attempt <= _LARGEST else 0,
        step=raw["step"],
        wall_ns=raw["wall_ns"],
        model=str(raw["model"]),
        clock="device" if raw.get("clock") == "device" else "host",
        group=_text(raw.get("group")),
        memory=bytes_of,
        checksum=tuple(value[:MOST_TEXT] if isinstance(value, str) else None for value in sums),
        nonfinite_forward=_index(raw.get("nonfinite_forward"), modules),
        nonfinite_backward=_index(raw.get("nonfinite_backward"), modules),
        skipped=raw.get("skipped") is True,
        device_peak=raw["device_peak"] if _is_count(raw.get("device_peak")) else None,
        device_bytes=raw["device_bytes"] if _is_count(raw.get("device_bytes")) else None,
        peaks=_peaks(raw.get("peaks"), modules),
        out_of_memory=raw.get("out_of_memory") is True,
        trail=raw.get("trail") is True,
        good_step=raw["good_step"] if _is_count(raw.get("good_step")) else None,
        good_some_step=raw["good_some_step"] if _is_count(raw.get("good_some_step")) else None,
        own_norm=_number(raw.get("own_norm")),
        work=read_work(raw.get("work")),
        **lists,
    )


_TIMES = ("forward_us", "backward_us", "host_forward_us", "host_backward_us")
_FLOATS = (*_TIMES, "grad_norm", "local_norm", "weight_norm", "update_ratio", "zero_share")
_PLAIN = ("nonfinite_forward", "nonfinite_backward", "device_peak", "device_bytes", "good_step", "good_some_step")
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""JSON has no such numbers."""


PEAK_PHASES = ("forward", "backward", "optimizer")


def _peaks(raw: Any, modules: int) -> dict[str, tuple[int, int | None]]:
    found: dict[str, tuple[int, int | None]] = {}
    for phase in PEAK_PHASES if isinstance(raw, Mapping) else ():
        pair = raw.get(phase)
        if isinstance(pair, list | tuple) and len(pair) == 2 and _is_count(pair[0]):
            found[phase] = (pair[0], _index(pair[1], modules))
    return found


def _numbers(raw: Any, count: int) -> tuple[float | None, ...]:
    """All None if the list is not usable."""
    if not isinstance(raw, list) or len(raw) != count:
        return (None,) * count
    return tuple(map(_number, raw))


def _number(raw: Any) -> float | None:
    if type(raw) in (int, float):
        return float(raw) if abs(raw) <= _LARGEST or type(raw) is float else None
    return _WORDS.get(raw) if isinstance(raw, str) else None


def _bytes(value: float | None) -> int:
    return int(value) if value is not None and 0 <= value <= _LARGEST else 0


def plain_numbers(values: Sequence[float | None]) -> list[float | str | None]:
    """The form in which ``_numbers`` reads them: four digits are enough, and JSON has no NaN."""
    return [value if value is None else _plain(value) for value in values]


def _plain(value: float) -> float | str:
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def _index(raw: Any, count: int) -> int | None:
    return raw if type(raw) is int and 0 <= raw < count else None


def _is_count(raw: Any) -> bool:
    return type(raw) is int and 0 <= raw <= _LARGEST


def _text(raw: Any) -> str:
    return raw[:MOST_TEXT] if isinstance(raw, str) else ""
