"""Names of the files that the store itself keeps in a run directory."""

from __future__ import annotations

from pathlib import Path

from stepscope.records.paths import HANGS
from stepscope.records.text import hang_name, host_in_name

__all__ = [
    "COLLECTIVES_PARQUET",
    "COMM_PARQUET",
    "EVENTS",
    "FINDINGS",
    "HUB",
    "HUB_EVENTS",
    "INBOX",
    "META",
    "NODES",
    "PARTS",
    "POSITIONS",
    "RANKS",
    "REDACTED_FILE",
    "REPORT_FILE",
    "SAMPLES",
    "SAMPLES_FOLDER",
    "SAMPLES_PARQUET",
    "SEGMENT_SUFFIX",
    "SIDECAR_SUFFIX",
    "STACKS",
    "STEPS",
    "STEPS_PARQUET",
    "SUMMARY",
    "SUMMARY_TEXT",
    "hang_path",
    "ring_key",
    "segment_path",
    "sidecar_path",
]

META = "run.json"
EVENTS = "events.jsonl"
SAMPLES = "samples.jsonl"
SAMPLES_FOLDER = "samples"
"""Older ones, thinned (``store/live/sample_files.py``)."""
STACKS = "stacks.jsonl"
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
HUB = "hub.json"
"""Where the run's hub listens and the token to ask it with; readable by its owner only."""
INBOX = "inbox"
"""What other nodes sent."""
HUB_EVENTS = "inbox/hub-events.jsonl"
"""What the hub itself saw of them: ``events.jsonl`` is the agent's."""
NODES = "nodes.json"
"""Who sent it, and how far ahead their clocks are."""
PARTS = "parts"
"""What of it was sealed while the run goes on."""
POSITIONS = "positions.json"
"""How far each sender came in what is sealed."""


def ring_key(host: str, pid: int, anchor_wall_ns: int) -> str:
    """What the files of one ring are called.

    The instant of the ring's creation tells apart the two rings of a process that replaced itself by ``exec`` (same
    pid, same start time) and those of two processes that had the same pid one after the other.
    """
    return f"{host_in_name(host)}-{pid}-{anchor_wall_ns:x}"


def segment_path(run_dir: Path, key: str) -> Path:
    return run_dir / STEPS / f"{key}{SEGMENT_SUFFIX}"


def sidecar_path(run_dir: Path, key: str) -> Path:
    return run_dir / STEPS / f"{key}{SIDECAR_SUFFIX}"


def hang_path(run_dir: Path, host: str, number: int) -> Path:
    """Each host counts its own: the watchdogs of two hosts do not know of one another."""
    return run_dir / HANGS / hang_name(host, number)
