"""A picture of the terminal view for the documentation, drawn without a terminal.

    python bench/terminal_picture.py runs/demo docs/images/terminal.svg --size 100x28

The picture is SVG with the text in it, so it is small and sharp, and names no font that would have to be fetched.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from stepscope.cli.commands.watch import LocalRun
from stepscope.terminal.app import WatchApp
from stepscope.terminal.feed import Feed

__all__ = ["picture_of"]

PATIENCE_S = 60.0
FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
FAMILY = re.compile(r"font-family: Fira Code, monospace")


def picture_of(run_dir: Path, size: tuple[int, int], keys: list[str]) -> str:
    local = LocalRun(run_dir)
    feed = Feed(local.where, end=local.close)
    feed.start()
    try:
        return asyncio.run(_picture(feed, size, keys))
    finally:
        feed.close()


async def _picture(feed: Feed, size: tuple[int, int], keys: list[str]) -> str:
    app = WatchApp(feed)
    async with app.run_test(size=size) as pilot:
        left_s = PATIENCE_S
        while (feed.now.ranks is None or feed.now.hosts is None) and left_s > 0:
            await pilot.pause(0.1)
            left_s -= 0.1
        for key in keys:
            await pilot.press(key)
            await pilot.pause(1.5)
        app.draw()
        await pilot.pause(0.1)
        drawn = app.export_screenshot(title="stepscope watch", simplify=True)
    plain = FONT.sub("", drawn)
    return FAMILY.sub("font-family: ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace", plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", default="80x24", help="columns and lines (default: 80x24)")
    parser.add_argument("--keys", default="", help="pressed before, divided by commas: enter, l, question_mark")
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    args.picture.write_text(picture_of(args.run, (width, height), [key for key in args.keys.split(",") if key]))


if __name__ == "__main__":
    main()
