"""Drives the view without a terminal: keys and sizes in, the lines of its screen out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

from textual.pilot import Pilot

from stepscope.terminal.app import WatchApp
from stepscope.terminal.feed import Feed

__all__ = ["Screen", "drive_app", "shown", "without_port"]

PATIENCE = 600


class Screen:
    """The screen of a running view."""

    def __init__(self, app: WatchApp, pilot: Pilot[None], feed: Feed) -> None:
        self.app, self.pilot, self.feed = app, pilot, feed

    @property
    def lines(self) -> list[str]:
        width = self.app.size.width
        strips = [self.app.screen_lines.render_line(y) for y in range(self.app.size.height)]
        assert all(strip.cell_length == width for strip in strips)
        return [strip.text for strip in strips]

    async def until(self, seen: str | Callable[[], Any]) -> list[str]:
        """Draw until this is on the screen."""
        for _ in range(PATIENCE):
            self.app.draw()
            await self.pilot.pause(0.02)
            if any(seen in line for line in self.lines) if isinstance(seen, str) else seen():
                self.app.draw()  # what became true since the last drawing is to be on the screen as well
                await self.pilot.pause()
                return self.lines
        raise AssertionError(f"never seen: {seen}\n" + "\n".join(self.lines))

    async def shows(self, screen: str) -> None:
        """Draw until the screen is exactly this: its parts arrive one after the other, in any order."""
        for _ in range(PATIENCE):
            self.app.draw()
            await self.pilot.pause(0.02)
            if without_port(self.lines) == screen:
                return
        assert without_port(self.lines) == screen, without_port(self.lines)

    async def resize(self, width: int, height: int) -> None:
        """Until the view is as large as its terminal."""
        await self.pilot.resize_terminal(width, height)
        for _ in range(PATIENCE):
            await self.pilot.pause(0.02)
            if self.app.screen_lines.size == self.app.size == (width, height):
                break
        self.app.draw()
        await self.pilot.pause()

    async def press(self, *keys: str) -> list[str]:
        await self.pilot.press(*keys)
        await self.pilot.pause()
        return self.lines


def without_port(lines: list[str]) -> str:
    """The screen, with five letters for the hub's port, which differs each time."""
    return re.sub(r"(http://127\.0\.0\.1:)\d{5}\b", r"\1PORT5", shown(lines))


def shown(lines: list[str]) -> str:
    return "\n".join(line.rstrip() for line in lines)


def drive_app(feed: Feed, use: Callable[[Screen], Awaitable[None]], size: tuple[int, int] = (80, 24)) -> None:
    async def run() -> None:
        app = WatchApp(feed)
        async with app.run_test(size=size) as pilot:
            await use(Screen(app, pilot, feed))

    asyncio.run(run())
