"""What Flight Recorders and stacks said, as files that ``stepscope flight`` reads."""

from __future__ import annotations

import os
from pathlib import Path

from stepscope.store.flights import keep_flights


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "flight").iterdir())


def test_what_was_kept_before_goes(tmp_path: Path) -> None:
    keep_flights(tmp_path, {0: b"{}", 12: b"[]"}, {0: "Thread 0x1"})
    assert names(tmp_path) == ["rank_0.json", "rank_12.json", "stacks_0.txt"]
    (tmp_path / "flight" / "mine.json").write_text("not ours")
    for path in (tmp_path / "flight").iterdir():
        os.utime(path, (1e9, 1e9))
    (tmp_path / "flight" / "rank_7.json").write_text("its last words, of a moment ago")
    keep_flights(tmp_path, {12: b"{}"})
    assert names(tmp_path) == ["mine.json", "rank_12.json", "rank_7.json"]
    assert (tmp_path / "flight" / "rank_12.json").read_bytes() == b"{}"
    keep_flights(tmp_path, {})
    assert names(tmp_path) == ["mine.json", "rank_12.json", "rank_7.json"]


def test_nothing_makes_no_folder(tmp_path: Path) -> None:
    keep_flights(tmp_path, {}, {})
    assert list(tmp_path.iterdir()) == []
