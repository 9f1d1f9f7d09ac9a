"""The document about a model's layers: sums that add up, the right sample, and sentences with their numbers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpt_layers import MODEL_ID, layer_lines, layer_records

from stepscope.records.layers import MEMORY_KINDS, LayerRecords, read_layers
from stepscope.records.layers import layer_lines as records_as_lines
from stepscope.records.text import bytes_text, norm_text, ns_text, share_text
from stepscope.reports.layers import choose_sample, layers_document, no_layers, render_layers

TINY = [["", "Net", -1, 0, 0], ["a", "Linear", 0, 10, 10], ["b", "Block", 0, 4, 4], ["b.c", "Linear", 2, 30, 30]]


def tiny(**sample: Any) -> LayerRecords:
    model = {"kind": "model", "model": "m", "modules": TINY, "compiled": False, "replicated": True}
    line = {"kind": "sample", "model": "m", "rank": 0, "step": 5, "wall_ns": 1, **sample}
    records, bad = read_layers([model, line])
    assert bad == 0
    return records


def document(records: LayerRecords, **chosen: Any) -> dict[str, Any]:
    sample = choose_sample(records, **chosen)
    assert sample is not None
    return layers_document(records, sample)


def by_name(shown: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in shown["modules"]}


def test_children_and_own_bytes_add_up_to_the_module() -> None:
    shown = document(layer_records())
    rows = shown["modules"]
    assert len(rows) == shown["modules_total"] == 125
    for at, row in enumerate(rows):
        inside = [row for row in rows if row["parent"] == at]
        for kind in MEMORY_KINDS:
            own = row["own_bytes"].get(kind, 0)
            assert row["bytes"].get(kind, 0) == own + sum(row["bytes"].get(kind, 0) for row in inside)
        assert row["total_bytes"] == sum(row["bytes"].values())
        own_us = row["own_forward_us"] + sum(row["forward_us"] for row in inside)
        assert row["forward_us"] == pytest.approx(own_us, rel=1e-6)
        assert row["backward_us"] == pytest.approx(
            row["own_backward_us"] + sum(row["backward_us"] for row in inside), rel=1e-6
        )
    assert shown["total_bytes"] == rows[0]["total_bytes"] == sum(kind["bytes"] for kind in shown["kinds"])
    assert shown["timeline"]["total_bytes"][-1] == shown["total_bytes"]
    assert rows[0]["share"] == 1


def test_numbers_have_their_text() -> None:
    shown = document(layer_records())
    for row in shown["modules"]:
        text = row["text"]
        assert text["total_bytes"] == bytes_text(row["total_bytes"])
        assert text["bytes"] == {kind: bytes_text(count) for kind, count in row["bytes"].items()}
        assert text["share"] == share_text(row["share"])
        assert text["forward_us"] == ns_text(row["forward_us"] * 1e3)
    json.dumps(shown, allow_nan=False)


def test_the_fullest_rank_and_its_last_sample() -> None:
    shown = document(layer_records())
    assert (shown["rank"], shown["step"], shown["ranks"]) == (3, 900, [0, 1, 2, 3])
    assert shown["steps"] == list(range(0, 1000, 100))
    assert shown["text"]["shown"] == "Rank 3, the fullest of 4 ranks, in step 900 (10 samples)"
    kinds = "activations 49%, optimizer state 25%, parameters 13%, gradients 13%, buffers <1%"
    most = "4.9 GiB at most up to this step (the step's peak explains 98%; 96 MiB is not accounted for)"
    assert shown["sentences"] == [
        f"The model's 125 modules hold 4.8 GiB: {kinds}.",
        "Over ranks: from 4.6 GiB (rank 0) to 4.8 GiB (rank 3), median 4.6 GiB.",
        "The peak of the step: 4.8 GiB in backward of head (forward 4.2 GiB, optimizer 2.4 GiB).",
        f"The device's allocator: {most}; 2.5 GiB at the end of the step (32 MiB, 1%, is not in any layer).",
    ]
    assert shown["unseen"] == [
        "the peak is added up from sizes, without what an operation or a library uses for itself"
    ]
    assert shown["notes"] == []
    assert (shown["device"]["peak_rest_bytes"], shown["device"]["rest_bytes"]) == (96 << 20, 32 << 20)


def test_what_a_rank_holds_outside_its_layers_counts() -> None:
    """On two ranks with equal layers, the second keeps a list of tensors that no layer owns."""
    records = layer_records(ranks=2, samples=2)
    leaking = tuple(
        replace(each, device_bytes=(each.device_bytes or 0) + (24 << 30)) if each.rank == 1 else each
        for each in records.samples
    )
    shown = document(replace(records, samples=leaking))
    assert shown["rank"] == 1
    assert shown["text"]["shown"] == "Rank 1, the fullest of 2 ranks, in step 100 (2 samples)"
    assert shown["over_ranks"]["text"] == "4.6 GiB on each of 2 ranks"
    assert shown["device"]["over_ranks"]["max_rank"] == 1
    assert shown["device"]["text"].endswith("over ranks from 2.5 GiB (rank 0) to 26 GiB (rank 1), median 14 GiB")


def test_without_the_allocator_of_every_rank_layers_are_compared() -> None:
    records = layer_records()
    unknown = tuple(replace(each, device_bytes=None) if each.rank == 0 else each for each in records.samples)
    shown = document(replace(records, samples=unknown))
    assert (shown["rank"], shown["device"]["over_ranks"]) == (3, None)


def test_a_rank_and_a_step_can_be_chosen() -> None:
    records = layer_records()
    chosen = {
        (None, None): (3, 900),
        (1, None): (1, 900),
        (1, 250): (1, 200),
        (2, 300): (2, 300),
        (None, 99): (3, 0),
    }
    for (rank, step), place in chosen.items():
        shown = document(records, rank=rank, step=step)
        assert (shown["rank"], shown["step"]) == place
    assert choose_sample(records, rank=4) is None
    assert document(records, step=0)["text"]["shown"] == "Rank 3, the fullest of 4 ranks, in step 0 (10 samples)"
    assert document(records, rank=1)["text"]["shown"] == "Rank 1 in step 900 (10 samples)"


def test_a_step_before_the_first_sample_shows_the_first() -> None:
    lines = [line for line in layer_lines(ranks=1) if line.get("step") != 0]
    records, _ = read_layers(lines)
    assert document(records, step=7)["step"] == 100


def test_only_the_last_attempt_counts() -> None:
    records = layer_records(ranks=2, samples=2)
    restarted = tuple(replace(sample, attempt=1, rank=0, step=50) for sample in records.samples[:1])
    shown = document(replace(records, samples=(*records.samples, *restarted)))
    assert (shown["attempt"], shown["rank"], shown["step"], shown["samples"]) == (1, 0, 50, 1)
    assert shown["over_ranks"]["text"] == "only this rank has samples"


def test_ranks_that_hold_the_same() -> None:
    shown = document(layer_records(ranks=3, samples=2))
    assert shown["rank"] == 0, "the first of equals"
    assert shown["over_ranks"]["text"] == "4.6 GiB on each of 3 ranks"


def test_a_container_that_is_not_called_has_the_time_of_its_children() -> None:
    rows = by_name(document(layer_records()))
    blocks = [row for name, row in rows.items() if name.startswith("layers.") and name.count(".") == 1]
    assert rows["layers"]["forward_us"] == pytest.approx(sum(row["forward_us"] for row in blocks))
    assert (rows["layers"]["own_forward_us"], rows["layers"]["text"]["own_forward_us"]) == (0, "0")


def test_times_are_as_measured_even_if_children_took_longer() -> None:
    """A module that is called from several places counts where the tree has it."""
    rows = by_name(document(tiny(forward_us=[10, 1, 4, 8], backward_us=[None, 2, None, 7])))
    assert [rows[name]["forward_us"] for name in ("", "a", "b", "b.c")] == [10, 1, 4, 8]
    assert [rows[name]["own_forward_us"] for name in ("", "a", "b", "b.c")] == [5, 1, 0, 8]
    assert [rows[name]["backward_us"] for name in ("", "a", "b", "b.c")] == [9, 2, 7, 7]
    damaged = by_name(document(tiny(forward_us=["nan", -1, "inf", 8])))
    assert [damaged[name]["forward_us"] for name in ("", "a", "b", "b.c")] == [8, None, 8, 8]


def test_norms_of_a_module_are_those_of_all_inside_it() -> None:
    rows = by_name(
        document(
            tiny(
                grad_norm=[None, 3.0, 4.0, None],
                weight_norm=[None, 6.0, 8.0, 0.0],
                update_ratio=[None, 0.5, 0.25, 0.125],
                zero_share=[None, 1.0, None, 0.5],
            )
        )
    )
    model, block = rows[""], rows["b"]
    assert (model["grad_norm"], model["weight_norm"]) == (5.0, 10.0)
    assert model["update_ratio"] == pytest.approx(math.hypot(3.0, 2.0) / 10, rel=1e-3)
    assert model["zero_share"] == pytest.approx((10 * 1.0 + 30 * 0.5) / 40)
    assert (block["grad_norm"], block["zero_share"], rows["b.c"]["update_ratio"]) == (4.0, 0.5, 0.125)
    assert model["text"]["grad_norm"] == norm_text(5.0) == "5"


def test_gradients_that_are_not_finite_are_said() -> None:
    records = tiny(grad_norm=[None, "nan", "inf", 1e-7], nonfinite_forward=3, nonfinite_backward=0, skipped=True)
    shown = document(records)
    rows = by_name(shown)
    assert [rows[name]["grad_norm"] for name in ("a", "b.c")] == ["nan", 1e-7]
    assert [rows[name]["text"]["grad_norm"] for name in ("a", "b", "b.c")] == ["NaN", "infinite", "1e-07"]
    assert shown["notes"] == [
        "The gradient scaler skipped this step because of infinite gradients.",
        "NaN or infinite: the first output is that of b.c, the first gradient is that of Net.",
    ]
    json.dumps(shown, allow_nan=False)


def test_where_it_began_is_said_when_everything_is_not_finite() -> None:
    model = {"kind": "model", "model": "m", "modules": TINY, "compiled": False, "replicated": True}
    common = {"kind": "sample", "model": "m", "rank": 0, "wall_ns": 1}
    at = {4: {}, 5: {"nonfinite_forward": 3}, 6: {"nonfinite_forward": 0, "nonfinite_backward": 0}}
    records, bad = read_layers([model, *({**common, "step": step, **found} for step, found in at.items())])
    assert bad == 0
    assert document(records, step=4)["notes"] == []
    assert document(records, step=5)["notes"] == ["NaN or infinite: the first output is that of b.c."]
    assert document(records)["notes"] == [
        "Values became NaN or infinite before this sample: in that of step 5, the first output is that of b.c."
    ]


def test_the_smallest_modules_are_left_out_and_still_counted() -> None:
    records = layer_records()
    sample = choose_sample(records)
    assert sample is not None
    whole = layers_document(records, sample)
    shown = layers_document(records, sample, most=20)
    rows = shown["modules"]
    assert (len(rows), shown["modules_left_out"], shown["modules_total"]) == (20, 105, 125)
    assert sum(row["left_out"] for row in rows) == 105
    assert all(row["parent"] < at for at, row in enumerate(rows))
    full = by_name(whole)
    for row in rows:
        assert row["total_bytes"] == full[row["name"]]["total_bytes"]
        assert (rows[row["parent"]]["name"] if row["parent"] >= 0 else "") == row["name"].rpartition(".")[0]
    assert by_name(shown).keys() > {"", "embed", "layers", "head", "layers.0", "layers.11"}


def test_the_allocators_peak_is_compared_with_that_of_the_step() -> None:
    memory = {"parameters": [0, 4 << 20, 0, 0], "activations": [0, 0, 0, 8 << 20]}

    def peak_text(most: int, peak: int | None) -> tuple[int | None, str]:
        peaks = {} if peak is None else {"backward": [peak << 20, 1]}
        device = document(tiny(memory=memory, peaks=peaks, device_peak=most << 20))["device"]
        return device["peak_rest_bytes"], device["text"]

    assert peak_text(100, 98) == (
        2 << 20,
        "100 MiB at most up to this step (the step's peak explains 98%; 2.0 MiB is not accounted for)",
    )
    elsewhere = "the other 50 MiB were in use at another time, or outside of the layers"
    assert peak_text(100, 50) == (
        50 << 20,
        f"100 MiB at most up to this step (the step's peak explains 50%; {elsewhere})",
    )
    assert peak_text(9, 12) == (
        -(3 << 20),
        "9.0 MiB at most up to this step (the step's peak, as it is added up, is 3.0 MiB more)",
    )
    assert peak_text(9, None) == (None, "9.0 MiB at most up to this step")


def test_device_times_have_those_of_the_host_beside_them() -> None:
    shown = document(layer_records())
    for row in shown["modules"]:
        assert row["host_forward_us"] == pytest.approx(row["forward_us"] / 10, rel=1e-6)
        assert row["host_backward_us"] == pytest.approx(row["backward_us"] / 10, rel=1e-6)
        assert row["text"]["host_forward_us"] == ns_text(row["host_forward_us"] * 1e3)
    texts = shown["modules"][0]["text"]
    assert shown["text"]["times"] == (
        f"of the device; the host took {texts['host_forward_us']} to start the work of forward, "
        f"and {texts['host_backward_us']} for backward"
    )
    assert f"  times     {shown['text']['times']}."[:60] in render_layers(shown, width=200)
    without = document(layer_records(device=False))
    assert (without["clock"], without["text"]["times"]) == ("host", "")
    assert {row["host_forward_us"] for row in without["modules"]} == {None}
    assert document(tiny(clock="device", forward_us=[1, 1, 1, 1]))["text"]["times"] == "of the device"


def test_what_is_not_seen() -> None:
    lines = layer_lines(ranks=2, samples=1, device=True)
    lines[0] |= {"compiled": True, "replicated": False}
    for line in lines[1:]:
        line["clock"] = "host"
        line["memory"]["activations"] = None
    records, _ = read_layers(lines)
    assert document(records)["unseen"] == [
        "activations were not measured",
        "the peak is added up from sizes, without what an operation or a library uses for itself",
        "layers inside the compiled region are not timed",
        "of parameters that are sharded, only this rank's part is counted",
        "times are the host's, which starts work on the device and does not wait for it",
    ]
    assert document(tiny())["unseen"] == ["activations were not measured", "layers were not timed"]
    lines = [{**line, "compiled": True} for line in layer_lines(ranks=1, samples=1, device=False)]
    assert document(read_layers(lines)[0])["unseen"] == [
        "activations of compiled code count for the model itself, not for its layers",
        "layers inside the compiled region are not timed",
    ]


def test_a_timeline_of_many_samples_is_thinned() -> None:
    records = layer_records(ranks=1, samples=1)
    samples = tuple(replace(records.samples[0], step=step) for step in range(1203))
    shown = document(LayerRecords(models=records.models, samples=samples))
    steps = shown["timeline"]["step"]
    assert len(steps) == 401
    assert (steps[-1], shown["samples"], shown["steps"]) == (1202, 1203, steps)


def test_no_samples() -> None:
    assert choose_sample(LayerRecords(models={}, samples=())) is None
    assert no_layers()["rank"] is None


def test_damaged_bytes_are_not_counted() -> None:
    shown = document(tiny(memory={"parameters": ["nan", -5, 1e300, 8]}))
    assert shown["total_bytes"] == 8
    assert MODEL_ID not in json.dumps(shown)


def test_every_key_is_documented(root: Path) -> None:
    section = (root / "docs/schema.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`([a-z_]+)`", section))
    shown = document(layer_records())
    keys = {
        *shown,
        *shown["modules"][0],
        *shown["kinds"][0],
        *shown["over_ranks"],
        *shown["device"],
        *shown["timeline"],
    }
    assert keys - documented - {"schema"} == set()


def test_the_peak_names_its_phase_and_its_module() -> None:
    lines = list(layer_lines(ranks=1, samples=2))
    at = [row[0] for row in next(line for line in lines if line["kind"] == "model")["modules"]].index("layers.7.mlp")
    peaks = {"forward": [3 << 30, 0], "backward": [5 << 30, at], "optimizer": [2 << 30, None]}
    peak_fields = {"peaks": peaks, "peak_source": "allocator"}
    records, bad = read_layers([line if line["kind"] == "model" else {**line, **peak_fields} for line in lines])
    assert bad == 0
    shown = document(records)
    peak = shown["peak"]
    assert (peak["bytes"], peak["phase"], peak["module"]) == (5 << 30, "backward", "layers.7.mlp")
    assert "source" not in peak  # older recorders wrote where it was from
    assert peak["text"] == "5.0 GiB in backward of layers.7.mlp (forward 3.0 GiB, optimizer 2.0 GiB)"
    assert [phase["module"] for phase in peak["phases"]] == ["GPT", "layers.7.mlp", None]
    assert shown["timeline"]["peak_bytes"] == [5 << 30] * 2
    assert shown["timeline"]["peak_phase"] == ["backward"] * 2
    assert f"  peak             {peak['text']}\n" in render_layers(shown, width=110)
    repeated, _ = read_layers([json.loads(json.dumps(line)) for line in records_as_lines(records)])
    assert [sample.peaks for sample in repeated.samples] == [sample.peaks for sample in records.samples]


def test_a_peak_that_is_at_no_layer_says_so() -> None:
    def place_text(**about: Any) -> str:
        peaks = {"backward": [3 << 20, None], "optimizer": [2 << 20, None]}
        lines = [{**line, "peaks": peaks, **about} for line in layer_lines(ranks=1, samples=1)]
        text: str = document(read_layers(lines)[0])["peak"]["text"]
        return text

    assert place_text() == "3.0 MiB in backward, outside of the layers (optimizer 2.0 MiB)"
    assert place_text(compiled=True) == "3.0 MiB in backward (optimizer 2.0 MiB)"  # where it was is not known


def test_without_peaks_there_are_none() -> None:
    shown = document(layer_records(ranks=1, samples=1, device=False))
    assert (shown["peak"], shown["timeline"]["peak_bytes"]) == (None, [None])
