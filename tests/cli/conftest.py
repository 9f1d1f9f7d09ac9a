"""A terminal for commands that are called in this process."""

from __future__ import annotations

import pytest


@pytest.fixture
def progress_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error, as captured, is a terminal, and nobody waits before drawing on it."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for name in ("PATIENCE_S", "REDRAW_S"):
        monkeypatch.setattr(f"stepscope.cli.output.{name}", 0.0)
