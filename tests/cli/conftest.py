"""A terminal for commands that are called in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def show_progress(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """``show_progress()``: standard error is a terminal from now on, and nobody waits before drawing on it."""

    def show() -> None:
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        for name in ("PATIENCE_S", "REDRAW_S"):
            monkeypatch.setattr(f"stepscope.cli.output.{name}", 0.0)

    return show
