"""``python -m gpu.layers``: layers, memory and gradients on a GPU, held against what is true.

- *sum*: what the layers account for at the peak of a step, beside the allocator's peak of such a step, within 5%;
- *faults*: a NaN, weights that were nudged, a flipped bit, lists that keep tensors, a leak in a job of 20 GB, …: the
  finding must name the layer, the rank and the step;
- *same*: losses with a sample in every step are bit-identical to those of the bare job, and no operation waits for the
  device (torch raises where one does).

The exit code is 0 if all cases are right.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nccl.shared_gpu import mps

from gpu.runner import JOBS, SOURCE

__all__ = ["CASES", "LayerCase", "main"]

MOST_REST = 0.05
LIMIT_S = 240.0
LARGE = ("--width", "768", "--vocabulary", "50257", "--batch", "8", "--length", "1024", "--steps", "12")
WIDE = ("--width", "1024", "--vocabulary", "8192", "--batch", "16", "--length", "512", "--steps", "12")


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    name: str
    args: tuple[str, ...]
    ranks: int = 1
    mode: str = "sampled"
    finding: str = ""
    """The kind that must be found; empty: none about layers, memory, gradients or loss."""
    words: tuple[str, ...] = ()
    """What its text must contain."""
    rank: int | None = None
    steps: range | None = None
    """In which its first step must lie."""


def _fault(name: str, fault: str, finding: str, *words: str, **more: Any) -> LayerCase:
    args = ("--fault", fault, *more.pop("args", ()))
    return LayerCase(name=f"fault/{name}", args=args, finding=finding, words=words, **more)


TRAIL = ("--pause-s", "0.3", "--steps", "70")
"""Steps that are long enough to look at a few gradients.  All would take 1 ms after such a pause, and may take 0.6."""


def _trail(name: str, fault: str, finding: str, *words: str, **more: Any) -> LayerCase:
    args = ("--fault", fault, *TRAIL, *more.pop("args", ()))
    more = {"rank": 1, **more}
    return LayerCase(name=f"trail/{name}", args=args, finding=finding, words=words, ranks=2, **more)


CASES = (
    LayerCase(name="sum/plain", args=LARGE, mode="every"),
    LayerCase(name="sum/autocast", args=(*LARGE, "--autocast"), mode="every"),
    LayerCase(name="sum/checkpoint", args=(*LARGE, "--checkpoint"), mode="every"),
    LayerCase(name="sum/fsdp2", args=(*LARGE, "--fsdp"), mode="every"),
    LayerCase(name="sum/fsdp2_two", args=(*LARGE, "--fsdp"), mode="every", ranks=2),
    LayerCase(name="sum/ddp_two", args=LARGE, mode="every", ranks=2),
    LayerCase(name="sum/wide", args=WIDE, mode="every"),
    LayerCase(name="sum/wide_checkpoint", args=(*WIDE, "--checkpoint", "--fused"), mode="every"),
    LayerCase(name="same/plain", args=("--exact", "--no-waiting"), mode="every"),
    LayerCase(name="same/checkpoint", args=("--no-waiting", "--checkpoint", "--autocast"), mode="every"),
    LayerCase(name="same/sampled", args=("--exact", "--no-waiting", "--steps", "300")),
    LayerCase(name="same/ddp", args=("--exact",), mode="every", ranks=2),
    LayerCase(name="same/fsdp2", args=("--exact", "--fsdp"), mode="every", ranks=2),
    # The job counts its steps from 1, the recording from 0.
    _fault("nan", "nan", "loss_nan", "first in blocks.3", ranks=2, rank=1, mode="every", steps=range(49, 50)),
    _fault("nan_sampled", "nan", "loss_nan", ranks=2, rank=1, steps=range(49, 50), args=("--pause-s", "0.02")),
    # Between samples: what is kept of the last steps shows the layer and the rank.
    _trail("backward", "nan_backward", "loss_nan", "first in blocks.3", "on rank 1, in backward, at step 49"),
    _trail("long", "nan_backward", "loss_nan", "first in blocks.3.up on rank 1, in backward", args=("--pause-s", "1")),
    _trail("fsdp", "nan_backward", "loss_nan", "first in blocks.3", "on rank 1, in backward", args=("--fsdp",)),
    _trail("clipped", "nan_backward", "loss_nan", "first in blocks.3.up on rank 1, in backward", args=("--clip", "1")),
    _trail("forward", "nan", "loss_nan", "first on rank 1, in forward, at step 49"),
    _trail("update", "nan_update", "loss_nan", "the update of step 49 made the weights NaN", rank=None),
    LayerCase(name="trail/same", args=("--exact", "--no-waiting", *TRAIL)),
    LayerCase(name="trail/same_clipped", args=("--exact", "--no-waiting", "--clip", "1", *TRAIL)),
    _fault("nudge", "nudge", "replica_desync", "blocks.5.qkv", ranks=3, rank=1, mode="every", steps=range(49, 50)),
    _fault("flip", "flip", "replica_desync", "blocks.7.down", ranks=3, rank=1, mode="every", steps=range(49, 50)),
    _fault("flip_sampled", "flip", "replica_desync", "blocks.7.down", ranks=3, rank=1, args=("--steps", "300")),
    _fault("no_sync", "no_sync", "replica_desync", ranks=3, rank=1, mode="every", steps=range(49, 50)),
    _fault("dead", "dead", "dead_layer", "blocks.2.up", mode="every"),
    _fault("keep_loss", "keep_loss", "memory_creep", "kept, a list", args=("--steps", "400")),
    _fault("keep_logits", "keep_logits", "memory_creep", "kept, a list", args=("--steps", "400")),
    _fault("keep_hidden", "keep_hidden", "memory_creep", "kept, a list", args=("--steps", "400")),
    _fault("total", "total", "memory_creep", "total in main", args=("--steps", "1200")),
    _fault("leak_on_one", "leak_on_one", "memory_creep", "CACHE, a list", ranks=2, rank=1, args=("--steps", "240")),
    _fault("leak", "leak", "memory_creep", "float32 [25000000]", args=("--held-gb", "20", "--steps", "1500")),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu.layers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="GLOB", default="*", help="cases by name, such as 'sum/*'")
    parser.add_argument("--jobs", type=int, default=4, help="cases at the same time (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep what each run printed and recorded")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(arguments)
    cases = [case for case in CASES if any(fnmatch.fnmatch(case.name, one) for one in args.only.split(","))]
    with tempfile.TemporaryDirectory(prefix="stepscope-layers-") as scratch, mps(ranks=3) as (shared, said):
        print(f"{len(cases)} cases, {said}")
        folder = args.keep or Path(scratch)
        with ThreadPoolExecutor(args.jobs) as pool:
            futures = [(case, pool.submit(_run, case, args.device, folder, shared)) for case in cases]
            right = 0
            for case, future in futures:
                problems, told = future.result()
                right += not problems
                print(f"{'ok   ' if not problems else 'WRONG'} {case.name:22} {told}", flush=True)
                for problem in problems:
                    print(f"      {problem}", flush=True)
    print(f"{right} of {len(cases)} cases are right")
    return 0 if right == len(cases) else 1


def _run(case: LayerCase, device: str, folder: Path, shared: dict[str, str]) -> tuple[list[str], str]:
    """Problems, and what was seen."""
    name = case.name.replace("/", "-")
    words = [sys.executable, "-m", "stepscope", "run", "--quiet", "--no-html", "--dir", str(folder), "--name", name]
    words += ["--layers", case.mode]
    job = [str(JOBS / "layers_job.py"), "--device", device, *case.args]
    start = [sys.executable]
    if case.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    environment = {**os.environ, **shared, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    recorded = _output([*words, *start, *job], environment)
    if recorded.returncode:
        return [f"exit code {recorded.returncode}: {recorded.stderr[-1500:]}"], ""
    said = json.loads(recorded.stdout.strip().splitlines()[-1])
    run = folder / name
    summary = json.loads((run / "summary.json").read_text())
    if case.name.startswith("sum/"):
        return _judge_sum(run, said, environment)
    if case.name.startswith("same/") or case.name.startswith("trail/same"):
        bare = _output([*start, *job], environment)
        if bare.returncode:
            return [f"the bare job failed, with exit code {bare.returncode}: {bare.stderr[-1500:]}"], ""
        expected = json.loads(bare.stdout.strip().splitlines()[-1])["losses"]
        apart = [at for at, (ours, theirs) in enumerate(zip(said["losses"], expected, strict=True)) if ours != theirs]
        problems = [f"{len(apart)} losses differ from those of the bare job, from step {apart[0]} on"] if apart else []
        return problems + _alarms(summary), f"{len(said['losses'])} losses"
    return _judge_finding(case, summary)


def _output(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def _judge_sum(run: Path, said: dict[str, Any], environment: dict[str, str]) -> tuple[list[str], str]:
    printed = _output([sys.executable, "-m", "stepscope", "memory", str(run), "--json", "--rank", "0"], environment)
    if printed.returncode:
        return [printed.stderr[-500:]], ""
    document = json.loads(printed.stdout)
    peak = document["peak"]
    if not peak or not said["peak"]:
        return ["no peak is known"], ""
    off = peak["bytes"] / said["peak"] - 1
    kinds = ", ".join(f"{kind['title']} {kind['text']['bytes']}" for kind in document["kinds"])
    told = f"{off:+.1%} of {said['peak'] / 2**30:.2f} GiB; {peak['text']}; {kinds}; {document['device']['text']}"
    return ([] if abs(off) <= MOST_REST else [f"off by {off:+.1%}"]), told


def _alarms(summary: dict[str, Any]) -> list[str]:
    from healthy_layers import ALARMS

    return [f"false alarm: {one['title']}" for one in summary["findings"] if one["kind"] in ALARMS]


def _judge_finding(case: LayerCase, summary: dict[str, Any]) -> tuple[list[str], str]:
    found = [one for one in summary["findings"] if one["kind"] == case.finding]
    if not found:
        return [f"no {case.finding}; found: {[one['title'] for one in summary['findings']]}"], ""
    finding = found[0]
    text = json.dumps(finding, ensure_ascii=False)
    problems = [f"{word!r} is not in it" for word in case.words if word not in text]
    if case.rank is not None and finding.get("ranks") != [case.rank]:
        problems.append(f"ranks {finding.get('ranks')} instead of {case.rank}")
    first = (finding.get("steps") or [None])[0]
    if case.steps is not None and (first is None or first not in case.steps):
        problems.append(f"first step {first} instead of {case.steps}")
    if problems:
        problems.append(text[:1500])
    return problems, finding["title"]


if __name__ == "__main__":
    sys.exit(main())
