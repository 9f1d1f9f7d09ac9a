"""False alarms about gradients, layers, loss and memory: healthy trainings of 23 kinds must raise none.

Each job (``jobs/healthy_models.py``) runs twice under ``stepscope run``: with a sample of its layers in every step, and
at the default rate.  A finding of any severity counts, unless it is true of the job.

    python bench/healthy_layers.py                       # 46 runs: 10 minutes on two cores
    python bench/healthy_layers.py gan fsdp2 --steps 600
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ALARMS", "Outcome", "main", "run_job"]

HERE = Path(__file__).resolve().parent
JOB = HERE / "jobs" / "healthy_models.py"
ALARMS = (
    *("loss_nan", "nan_gradients", "loss_spike", "exploding_gradients", "vanishing_gradients", "dead_layer"),
    *("unused_parameters", "replica_desync", "memory_creep", "uneven_batches"),
)
TRUE_OF = {"unused_head": {"unused_parameters"}}
"""Findings that are right."""
MODES = ("every", "sampled")
ALONE = (
    *("plain", "bf16", "fp16_with_skips", "gan", "frozen_layers", "unfrozen_later", "experts", "checkpointing"),
    *("growing_cache", "accumulation", "lbfgs", "tied_rnn_padded", "longer_sequences", "ema_copy", "sparse_embedding"),
    *("lora", "two_tasks", "unused_head"),
)
TOGETHER = ("ddp_batchnorm", "ddp_last_batch", "ddp_padded", "fsdp2", "tensor_parallel")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    exit_code: int
    summary: dict[str, Any]
    samples: int
    """Of layers."""
    seconds: float

    def alarms(self, job: str) -> list[dict[str, Any]]:
        found = [one for one in self.summary.get("findings", ()) if one["kind"] in ALARMS]
        return [one for one in found if one["kind"] not in TRUE_OF.get(job, ())]

    def missing(self, job: str) -> set[str]:
        """What should have been found, and was not."""
        return TRUE_OF.get(job, set()) - {one["kind"] for one in self.summary.get("findings", ())}


def run_job(job: str, mode: str, steps: int, folder: Path) -> Outcome:
    """Run one job in this folder."""
    command = [
        sys.executable,
        "-m",
        "stepscope",
        "run",
        "--quiet",
        "--no-html",
        "--no-hub",
        "--dir",
        str(folder),
        "--name",
        "run",
    ]
    command += ["--layers", mode, *(["--nproc-per-node", "2"] if job in TOGETHER else [])]
    inherited = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, inherited)), "OMP_NUM_THREADS": "1"}
    began_s = time.monotonic()
    command += [str(JOB), job, "--steps", str(steps)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    run_dir = folder / "run"
    summary_file, layers_file = run_dir / "summary.json", run_dir / "layers.jsonl"
    lines = layers_file.read_text().splitlines() if layers_file.exists() else []
    return Outcome(
        exit_code=done.returncode,
        summary=json.loads(summary_file.read_text()) if summary_file.exists() else {},
        samples=len({json.loads(line).get("step") for line in lines if '"sample"' in line}),
        seconds=time.monotonic() - began_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="some of them only")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--layers", choices=MODES, action="append", help="one way only (default: both)")
    args = parser.parse_args()
    modes: Sequence[str] = args.layers or MODES
    jobs: Sequence[str] = args.jobs or (*ALONE, *TOGETHER)
    wrong = 0
    machine = f"{os.cpu_count()} cores, {platform.machine()}, CPU"
    print(f"{datetime.datetime.now(tz=datetime.timezone.utc):%Y-%m-%d}, {machine}, {args.steps} steps")
    print(f"{'job':18} {'layers':8} {'samples':>7} {'loss':>10} {'grad_norm':>10} {'seconds':>8}  findings")
    for job in jobs:
        for mode in modes:
            with tempfile.TemporaryDirectory(prefix="stepscope-healthy-") as work:
                outcome = run_job(job, mode, args.steps, Path(work))
            alarms = outcome.alarms(job)
            said = [f"{one['kind']} ({one['severity']}): {one['title']}" for one in alarms]
            said += [f"not found: {kind}" for kind in sorted(outcome.missing(job))]
            said += [] if outcome.exit_code == 0 and outcome.summary else [f"exit code {outcome.exit_code}"]
            metrics = outcome.summary.get("metrics", {})
            last = [f"{metrics[name]['last']:.4g}" if name in metrics else "-" for name in ("loss", "grad_norm")]
            print(
                f"{job:18} {mode:8} {outcome.samples:7} {last[0]:>10} {last[1]:>10} {outcome.seconds:8.1f}  "
                f"{'; '.join(said) or 'none'}",
                flush=True,
            )
            wrong += bool(said)
    print(f"{len(jobs) * len(modes)} runs, {wrong} with a wrong finding")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
