"""``stepscope memory``: the tree of modules, what can be chosen, and what it says without samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.cluster import Cluster
from gpt_layers import layer_lines, layer_records, write_layer_samples
from made_runs import record

from stepscope.cli.main import run_command
from stepscope.errors import RunError, UsageError
from stepscope.records.layers import read_layers
from stepscope.reports.layers import choose_sample, layers_document, render_layers

GOLDEN = Path(__file__).parents[1] / "reports" / "golden"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = record(tmp_path / "runs", "gpt", Cluster(ranks=4, steps=20).run(), sealed=False)
    write_layer_samples(made)
    return made


def test_the_tree(run_dir: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[Path, str], None]) -> None:
    """As wide as a terminal that nobody sees."""
    assert run_command(["memory", str(run_dir)]) == 0
    golden(GOLDEN / "memory.txt", capsys.readouterr().out)


def test_wide_terminals_have_bars(golden: Callable[[Path, str], None]) -> None:
    records = layer_records(ranks=1, samples=2, device=False)
    sample = choose_sample(records)
    assert sample is not None
    golden(GOLDEN / "memory_wide.txt", render_layers(layers_document(records, sample), width=110, depth=2, sort="time"))


def test_a_rank_a_step_and_a_depth(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["memory", str(run_dir), "--rank", "1", "--step", "250", "--depth", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Rank 1 in step 200 (10 samples)"
    at = next(at for at, line in enumerate(lines) if line.startswith("  GPT"))
    assert [line.split()[0] for line in lines[at : at + 5]] == ["GPT", "layers.0", "embed", "head", "norm"]
    assert lines[at + 5] == "  More inside: --depth 2"


def test_sorted_by_name(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["memory", str(run_dir), "--depth", "1", "--sort", "name"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("  GPT"))
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == ["embed", "head", "layers.0", "norm"]


def test_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["memory", str(run_dir), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["kind"], shown["rank"], shown["step"]) == (1, "layers", 3, 900)
    assert len(shown["modules"]) == 125


def test_a_sealed_run_keeps_its_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = record(tmp_path / "runs", "sealed", Cluster(ranks=2, steps=20).run())
    write_layer_samples(made, ranks=2, samples=1)
    assert run_command(["memory", str(made)]) == 0
    assert capsys.readouterr().out.startswith("Rank 0, the fullest of 2 ranks, in step 0 (1 sample)\n")


def test_a_run_without_samples_says_how_to_get_them(tmp_path: Path) -> None:
    made = record(tmp_path / "runs", "plain", Cluster(ranks=1, steps=5).run())
    with pytest.raises(RunError, match=r"plain has no layer samples; they begin at step 11"):
        run_command(["memory", str(made)])


def test_a_rank_without_samples(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="rank 7 has no layer samples; ranks with samples: 0–3"):
        run_command(["memory", str(run_dir), "--rank", "7"])
    with pytest.raises(UsageError, match="--step: must be a whole number, not '-1'"):
        run_command(["memory", str(run_dir), "--step=-1"])


@pytest.mark.parametrize("width", [20, 60, 80, 110])
def test_fits_and_nothing_of_a_model_reaches_the_terminal(width: int) -> None:
    """Names come from the script: unlike blocks, blocks of blocks, a name that is no name."""
    model = {
        "kind": "model",
        "model": "m",
        "modules": [
            ["", "Net\x1b[31m", -1, 0, 0],
            ["stages", "ModuleList", 0, 0, 0],
            *(
                row
                for at in range(3)
                for row in (
                    [f"stages.{at}", "Sequential", 1, 0, 0],
                    [f"stages.{at}.0", "Conv", 2 + 4 * at, 10, 10],
                    [f"stages.{at}.1", "Conv", 2 + 4 * at, 10, 10],
                    [f"stages.{at}.2", "Norm", 2 + 4 * at, 2 + at // 2, 2],
                )
            ),
            *([f"head{'x' * 80}{at}\n", "Linear", 0, 1, 1] for at in range(60)),
        ],
    }
    bytes_of = [4 * row[3] for row in model["modules"]]  # type: ignore[index]
    sample = {"kind": "sample", "model": "m", "rank": 0, "step": 1, "wall_ns": 1, "memory": {"parameters": bytes_of}}
    records, bad = read_layers([model, sample])
    assert bad == 0
    text = render_layers(layers_document(records, records.samples[0]), width=width)
    assert max(map(len, text.splitlines())) <= max(width, 60)
    assert all(line == line.rstrip() for line in text.splitlines())
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "  0 … 1  2 × Sequential, 88 B each" in text
    assert "  0 … 1  4 × Conv, 40 B each" in text
    assert "  2  Sequential" in text
    assert "  … and 21 more" in text


def test_a_block_that_is_unlike_the_others_is_seen() -> None:
    lines = layer_lines(ranks=1, samples=1, layers=6, device=False)
    blocks = [at for at, row in enumerate(lines[0]["modules"]) if row[1] == "Block"]
    lines[1]["memory"]["activations"][blocks[1] + 2] += 1 << 30  # its attention
    lines[1]["memory"]["activations"][blocks[5] + 2] += 1 << 20
    lines[1]["forward_us"][blocks[3]] *= 20
    records, _ = read_layers(lines)
    text = render_layers(layers_document(records, records.samples[0]), width=110, depth=2, sort="name")
    shown = [line.split("  ")[3:5] for line in text.splitlines() if line.startswith("      ") and "Block" in line]
    assert shown == [
        ["0", "Block"],
        ["1", "Block"],
        ["2", "Block"],
        ["3", "Block"],
        ["4 … 5", "2 × Block, 234 MiB to 235 MiB each"],
    ]


def test_a_model_of_20_000_nested_modules() -> None:
    names = ["a" * min(at, 1) + ".a" * max(at - 1, 0) for at in range(256)]
    rows = [[names[min(at, 255)], "Wrapper", at - 1, 1, 1] for at in range(20_000)]
    model = {"kind": "model", "model": "m", "modules": rows}
    memory = {"parameters": [4] * 20_000}
    records, bad = read_layers(
        [model, {"kind": "sample", "model": "m", "rank": 0, "step": 1, "wall_ns": 1, "memory": memory}]
    )
    assert bad == 0
    text = render_layers(layers_document(records, records.samples[0]), depth=100)
    assert "Wrapper" in text
    shown = layers_document(records, records.samples[0], most=1000)
    assert (len(shown["modules"]), shown["modules"][-1]["left_out"]) == (1000, 19_000)
