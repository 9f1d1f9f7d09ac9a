"""``layers.jsonl`` as a run has it: checked, thinned, under the ranks that are shown, sealed or not."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rings import write_steps

from stepscope.hub.live.lines import LayerLines
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.runs import Runs
from stepscope.records.layers import LayerRecords, LayerSample, ModelTree, ModuleInfo, layer_lines, read_layers
from stepscope.records.throughput import Work
from stepscope.store.create import RunPaths
from stepscope.store.documents import end_run
from stepscope.store.file_io import append_lines
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.live.sample_files import LayerChoice
from stepscope.store.load import open_run
from stepscope.store.sealed.seal import seal
from stepscope.wire.frames import part_of

MODEL = {
    "kind": "model",
    "model": "ab12",
    "compiled": False,
    "replicated": True,
    "modules": [["", "Net", -1, 0, 0], ["head", "Linear", 0, 6, 6]],
}
HEAD = {"kind": "sample", "step": 37, "wall_ns": 5, "model": "ab12", "clock": "host", "group": "", "skipped": False}
FIGURES = {
    "forward_us": [2.5, 1.25],
    "grad_norm": [None, "nan"],
    "checksum": [None, "00ff"],
    "nonfinite_forward": 1,
    "work": {"flops": 1200, "samples": 4, "tokens": 32},
}


def line(rank: int = 0, pid: int | None = None, **changes: Any) -> bytes:
    """As the agent writes it."""
    whose = {"rank": rank, "attempt": 0, **({} if pid is None else {"pid": pid})}
    return json.dumps({**whose, **HEAD, **FIGURES, **changes}, separators=(",", ":")).encode() + b"\n"


MODEL_LINE = json.dumps(MODEL, separators=(",", ":")).encode() + b"\n"


def samples_of(run_dir: Path) -> list[tuple[int, int]]:
    return [(sample.step, sample.rank) for sample in open_run(run_dir).layers.samples]


def test_samples_come_in_order_and_stay_when_sealed(paths: RunPaths, rings: Any) -> None:
    write_steps(rings(0), 3)
    append_lines(paths.run_dir / "layers.jsonl", MODEL_LINE + line(step=137) + line() + line() + b"{nonsense\n")
    end_run(paths.run_dir, exit_code=0, status="finished")
    before = open_run(paths.run_dir)
    assert [(sample.step, sample.rank, sample.forward_us) for sample in before.layers.samples] == [
        (37, 0, (2.5, 1.25)),  # a line that was read twice counts once
        (137, 0, (2.5, 1.25)),
    ]
    assert before.layers.models["ab12"].modules[1].name == "head"
    assert math.isnan(before.layers.samples[0].grad_norm[1] or 0.0)
    assert "1 lines of layers.jsonl could not be read." in before.notices
    seal(paths.run_dir)
    assert samples_of(paths.run_dir) == [(37, 0), (137, 0)]
    assert open_run(paths.run_dir).layers.samples[0].work == Work(flops=1200, samples=4, tokens=32)


def test_samples_of_other_nodes_are_loaded_and_sealed(
    paths: RunPaths, rings: Any, drain: Any, sender: Any, send: Any
) -> None:
    """Under the rank that their process is shown as, on the hub's clock; only the other node described the model."""
    own = rings(0)
    write_steps(own, 3)
    drain(own, ended=7)
    append_lines(paths.run_dir / "layers.jsonl", line(pid=int(own.path.stem)))
    node = sender(1, offset_ns=1_000)
    pid = node.rings[1].about.identity.pid
    sent = part_of("lines", MODEL_LINE + line(7, pid, wall_ns=1_900) + b"\xff\n", name="layers.jsonl", offset=0)
    inbox = Inbox(paths.run_dir)
    inbox.introduce(node.spool, node=node.node, host=node.host, address="10.0.0.1")
    send(inbox, node.everything(), node.frame([sent]))
    inbox.save_nodes()
    inbox.close()
    end_run(paths.run_dir, exit_code=0, status="finished", wall_ns=9)
    before = open_run(paths.run_dir)
    assert sorted((sample.rank, sample.step, sample.wall_ns) for sample in before.layers.samples) == [
        (0, 37, 5),
        (11, 37, 900),
    ]
    assert "1 lines from other nodes could not be read." in before.notices
    seal(paths.run_dir)
    after = open_run(paths.run_dir).layers
    assert [*map(repr, after.samples)] == [*map(repr, before.layers.samples)]
    assert after.models == before.layers.models


def test_of_very_many_samples_the_same_steps_of_all_ranks_are_kept() -> None:
    steps = range(37, 30_037, 100)
    lines = [line(rank, step=step, nonfinite_forward=None) for step in steps for rank in range(2)]
    lines[2 * 57 + 1] = line(1, step=steps[57])  # the only one with something that is not finite
    lines = [line_bytes.replace(b',"nonfinite_forward":null', b"") for line_bytes in lines]
    choice = LayerChoice(most_steps=10)
    choice.see(lines)
    records, bad = read_layers(json.loads(line_bytes) for line_bytes in [MODEL_LINE, *filter(choice.takes, lines)])
    assert bad == 0
    found = {rank: [sample.step for sample in records.samples if sample.rank == rank] for rank in range(2)}
    assert found[0] == found[1]
    assert len(found[0]) == 11
    assert (found[0][0], found[0][-1]) == (steps[0], steps[-1])
    assert steps[57] in found[0]
    everything = LayerChoice()
    everything.see(lines)
    assert all(map(everything.takes, [*lines, MODEL_LINE, b"nonsense"]))


def test_the_hub_holds_few_bytes_of_a_long_run() -> None:
    layer_lines_in_memory = LayerLines(most_bytes=100 * len(line()))
    layer_lines_in_memory.put([MODEL_LINE, b"nonsense", line(step=11)], node="0", offset_ns=0)
    for step in range(37, 100_037, 100):
        layer_lines_in_memory.put([line(step=step)], node="0", offset_ns=0)
    records = [json.loads(raw) for _, raw, _ in layer_lines_in_memory.raw(["0"])]
    assert records[0] == MODEL
    steps = [row["step"] for row in records[1:]]
    assert steps[0] == 11
    assert 40 < len(steps) < 100
    assert max(steps) > 95_000
    assert layer_lines_in_memory.raw(["1"]) == []


def test_a_run_in_memory_has_them_live_and_afterwards(paths: RunPaths, rings: Any) -> None:
    live = LiveRun()
    live.lines("layers.jsonl", [MODEL_LINE, line(3), b"{}"], node="0", offset_ns=2)
    assert [(sample.rank, sample.step, sample.wall_ns) for sample in live.layers().samples] == [(3, 37, 3)]
    write_steps(rings(0), 3)
    append_lines(paths.run_dir / "layers.jsonl", MODEL_LINE + line())
    end_run(paths.run_dir, exit_code=0, status="finished")
    data = open_run(paths.run_dir)
    opened = asyncio.run(Runs.of_past(paths.run_dir, data, {}).open(paths.run_dir.name))
    assert opened is not None and asyncio.run(opened.layers()) is data.layers


# -- Whatever comes from outside --------------------------------------------------------------------------------------

_NUMBERS = st.one_of(st.none(), st.floats(0, 1e30).map(lambda value: float(f"{value:.4g}")), st.just(math.inf))
_COUNTS = st.integers(0, 1 << 50)
_MAYBE = st.one_of(st.none(), st.integers(1, 1 << 40))
_WORK = st.one_of(st.none(), st.builds(Work, flops=st.integers(1, 1 << 60), samples=_MAYBE, tokens=_MAYBE))


@st.composite
def records(draw: st.DrawFn) -> LayerRecords:
    count = draw(st.integers(1, 5))
    modules = tuple(
        ModuleInfo(name=f"m{at}" if at else "", type="Linear", parent=draw(st.integers(0, at - 1)) if at else -1,
                   elements=draw(_COUNTS), trainable=draw(_COUNTS))
        for at in range(count)
    )  # fmt: skip
    model = ModelTree(id="ab", modules=modules, compiled=draw(st.booleans()), replicated=draw(st.booleans()))
    lists = st.tuples(*[_NUMBERS] * count)
    kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
    where = st.one_of(st.none(), st.integers(0, count - 1))
    keys = draw(st.lists(st.tuples(st.integers(0, 3), _COUNTS, st.integers(0, 9)), unique=True, max_size=4))
    samples = [
        LayerSample(
            rank=rank, attempt=attempt, step=step, wall_ns=draw(_COUNTS), model="ab",
            clock=draw(st.sampled_from(["host", "device"])), group=draw(st.sampled_from(["", "tp=1"])),
            forward_us=draw(lists), backward_us=draw(lists), grad_norm=draw(lists), weight_norm=draw(lists),
            host_forward_us=draw(lists), host_backward_us=draw(lists),
            update_ratio=draw(lists), zero_share=draw(lists), local_norm=draw(lists),
            memory={kind: draw(st.tuples(*[_COUNTS] * count)) for kind in kinds},
            checksum=draw(st.tuples(*[st.one_of(st.none(), st.just("0f"))] * count)),
            nonfinite_forward=draw(where), nonfinite_backward=draw(where), skipped=draw(st.booleans()),
            device_peak=draw(st.one_of(st.none(), _COUNTS)), device_bytes=draw(st.one_of(st.none(), _COUNTS)),
            work=draw(_WORK), own_norm=draw(_NUMBERS), good_step=draw(_MAYBE), good_some_step=draw(_MAYBE),
        )
        for attempt, step, rank in sorted(keys)
    ]  # fmt: skip
    trails = tuple(replace(sample, trail=True) for sample in samples if draw(st.booleans()))
    return LayerRecords(models={"ab": model}, samples=tuple(samples), trails=trails)


@given(records())
def test_lines_read_back_the_same(given_records: LayerRecords) -> None:
    lines = [json.loads(json.dumps(record)) for record in layer_lines(given_records)]
    assert read_layers(lines) == (given_records, 0)


_ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
_SPOILED = st.dictionaries(
    st.sampled_from([*HEAD, *FIGURES, "rank", "attempt", "modules", "compiled", "memory", "backward_us"]),
    _ANYTHING,
    max_size=4,
)


@given(st.lists(st.tuples(st.booleans(), _SPOILED), max_size=4))
def test_damaged_lines_are_counted_and_harm_nobody(spoiled: list[tuple[bool, dict[str, Any]]]) -> None:
    lines: list[Any] = [MODEL]
    for is_model, changes in spoiled:
        lines.append({**(MODEL if is_model else json.loads(line())), **changes})
    found, bad = read_layers(lines)
    assert len(found.samples) + bad <= len(spoiled)
    for sample in found.samples:
        count = len(found.models[sample.model].modules)
        assert len(sample.forward_us) == len(sample.checksum) == len(sample.memory["optimizer"]) == count
        assert sample.nonfinite_forward is None or sample.nonfinite_forward < count
    repeated, none = read_layers(json.loads(json.dumps(record)) for record in layer_lines(found))
    assert none == 0
    assert len(repeated.samples) == len(found.samples)


@pytest.mark.parametrize("text", [b"", b"\n", b"[]\n", b'{"kind":"sample"}\n', b'{"kind":"model","modules":[1]}\n'])
def test_a_file_without_a_sample_is_no_reason_to_fail(paths: RunPaths, rings: Any, text: bytes) -> None:
    write_steps(rings(0), 3)
    append_lines(paths.run_dir / "layers.jsonl", text)
    assert not open_run(paths.run_dir).layers
