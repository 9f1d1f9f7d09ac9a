"""Names of the files in a run directory."""

from __future__ import annotations

from pathlib import Path

from stepscope.records.paths import HANGS
from stepscope.records.text import hang_name, host_in_name

__all__ = [
    "ALERTS",
    "ALERT_REQUESTS",
    "ARCHIVED",
    "CAPTURE_ANALYSIS",
    "CAPTURE_RECORD",
    "CAPTURE_REQUESTS",
    "COLLECTIVES_PARQUET",
    "COMM_PARQUET",
    "EVENTS",
    "FINDINGS",
    "FINDING_HISTORY",
    "HUB",
    "HUB_EVENTS",
    "INBOX",
    "INCIDENTS",
    "JUDGED",
    "LABELS",
    "LAYERS",
    "META",
    "NODES",
    "OUTBOX",
    "PARTS",
    "POSITIONS",
    "RANKS",
    "REDACTED_FILE",
    "REPORT_FILE",
    "SAMPLES",
    "SAMPLES_FOLDER",
    "SAMPLES_PARQUET",
    "SEGMENT_SUFFIX",
    "SENT",
    "SIDECAR_SUFFIX",
    "STACKS",
    "STEPS",
    "STEPS_PARQUET",
    "SUMMARY",
    "SUMMARY_TEXT",
    "SWEEPS",
    "SWEEP_RESULT",
    "SWEEP_STATE",
    "hang_path",
    "ring_key",
    "segment_path",
    "sidecar_path",
]

META = "run.json"
EVENTS = "events.jsonl"
SAMPLES = "samples.jsonl"
SAMPLES_FOLDER = "samples"
"""Older samples, thinned (``store/live/sample_files.py``)."""
STACKS = "stacks.jsonl"
LAYERS = "layers.jsonl"
"""What sampled steps showed of the model's layers (``records/layers.py``)."""
STEPS = "steps"
SEGMENT_SUFFIX = ".seg"
SIDECAR_SUFFIX = ".json"
STEPS_PARQUET = "steps.parquet"
SAMPLES_PARQUET = "samples.parquet"
COMM_PARQUET = "comm.parquet"
COLLECTIVES_PARQUET = "collectives.parquet"
RANKS = "ranks.json"
SUMMARY = "summary.json"
SUMMARY_TEXT = "summary.txt"
REPORT_FILE = "report.html"
REDACTED_FILE = "report-redacted.html"
FINDINGS = "findings.json"
FINDING_HISTORY = "finding-history.jsonl"
"""When each finding was shown, changed and was over (``records/finding_history.py``); written by the run's hub."""
JUDGED = "judged.json"
"""The present state of an active run as its hub judged it, for readers that do not open the run (``/metrics``)."""
INCIDENTS = "incidents.jsonl"
"""Changes of incidents (``alerts/model.py``); written by the run's hub."""
ALERTS = "alerts"
OUTBOX = "alerts/outbox.jsonl"
"""Messages to be sent; written by the run's hub."""
SENT = "alerts/sent.jsonl"
"""What became of them; written by the sender."""
ALERT_REQUESTS = "alerts/requests.jsonl"
"""Acknowledgments and silences by people, appended by whoever takes them; read by the run's hub."""
CAPTURE_REQUESTS = "captures/requests.jsonl"
"""Captures that people and programs requested (``records/capture.py``), appended by whoever takes them; read by the
run's hub."""
CAPTURE_RECORD = "capture.json"
"""In the folder of a capture; written by the run's hub."""
CAPTURE_ANALYSIS = "analysis.json"
"""Beside it: the document of ``stepscope trace --json``."""
SWEEPS = "sweeps"
"""Where ``stepscope sweep`` writes, next to ``runs``: each ``sweeps/NAME`` has the two files below, and ``runs``."""
SWEEP_STATE = "sweep.json"
SWEEP_RESULT = "result.json"
HUB = "hub.json"
"""The address of the run's hub and the token for reading from it; readable by its owner only."""
ARCHIVED = ".archived.json"
"""In a copy of an archived run on this disk (``archive/cache.py``): where it came from.  Nothing writes to a copy."""
LABELS = "labels.json"
"""The name, tags and note that people gave the run."""
INBOX = "inbox"
"""What other nodes sent."""
HUB_EVENTS = "inbox/hub-events.jsonl"
"""Events that the hub itself observed.  ``events.jsonl`` belongs to the agent."""
NODES = "nodes.json"
"""The nodes that sent data, and how far ahead their clocks are."""
PARTS = "parts"
"""The part of the inbox that was rewritten in columns while the run was active."""
POSITIONS = "positions.json"
"""How much of each sender's data is sealed."""


def ring_key(host: str, pid: int, anchor_wall_ns: int) -> str:
    """Return the name shared by the files of one ring.

    The creation time distinguishes the two rings of a process that replaced itself by ``exec`` (same pid, same start
    time), and the rings of two processes that had the same pid one after the other.
    """
    return f"{host_in_name(host)}-{pid}-{anchor_wall_ns:x}"


def segment_path(run_dir: Path, key: str) -> Path:
    return run_dir / STEPS / f"{key}{SEGMENT_SUFFIX}"


def sidecar_path(run_dir: Path, key: str) -> Path:
    return run_dir / STEPS / f"{key}{SIDECAR_SUFFIX}"


def hang_path(run_dir: Path, host: str, number: int) -> Path:
    """Return the path of a hang report.  Each host counts its own hangs: watchdogs do not know about other hosts."""
    return run_dir / HANGS / hang_name(host, number)
