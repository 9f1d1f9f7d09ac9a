"""Pictures of the page for README and docs, in both themes: a real demo run, looked at in a browser without a window.

    make screenshots                    # writes docs/images/*.png
    python bench/screenshots.py --run runs/demo --out docs/images
    python bench/screenshots.py --trace worker0.1623143089861.pt.trace.json.gz      # docs/images/trace-*.png

Everything that could differ from one time to the next but the run itself is fixed: the size of the window, its scale,
its fonts' language, no motion.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fakes.browser import launched, what_is_missing
from page_parts import Hub, served, wait_until

from stepscope.page.assets import is_built

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

THEMES = ("light", "dark")
WIDTH, HEIGHT = 1280, 800
TRACE_HEIGHT = 860
DRAWN = "document.querySelector('main[aria-busy=false]') !== null && window.__asked === 0"
COUNTED = """
window.__asked = 0;
const ask = window.fetch;
window.fetch = async (...words) => {
  if (String(words[0]).includes("/stream")) return ask(...words);
  window.__asked += 1;
  try { return await ask(...words); } finally { window.__asked -= 1; }
};
"""
CALM_MS = 1200.0
MOST_BYTES = 250_000


@dataclass(frozen=True, kw_only=True)
class Picture:
    name: str
    fragment: str
    """Behind the ``#`` of the address."""
    width: int = WIDTH
    height: int = HEIGHT
    do: Callable[[Page], None] | None = None


def _to_the_map(page: Page) -> None:
    map_of_ranks = page.get_by_role("region", name="Ranks and steps")
    map_of_ranks.scroll_into_view_if_needed()
    map_of_ranks.evaluate("(region) => scrollTo(0, region.getBoundingClientRect().top + scrollY - 90)")


PICTURES = (
    Picture(name="page", fragment="/run/demo"),
    Picture(name="page-ranks", fragment="/run/demo?rank=2", do=_to_the_map),
    Picture(name="page-narrow", fragment="/run/demo", width=420, height=900),
    Picture(name="page-list", fragment="/", height=480),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a finished demo (default: one is made)")
    parser.add_argument("--out", type=Path, default=Path("docs") / "images")
    parser.add_argument("--only", metavar="NAME", help="one picture")
    parser.add_argument("--trace", type=Path, help="take pictures of the page of this trace instead")
    args = parser.parse_args()
    missing = what_is_missing() or ("" if is_built() else "the page is not built (make page)")
    if missing:
        parser.error(missing)
    args.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="stepscope-pictures-"))
    try:
        if args.trace is not None:
            _trace(args.trace, work / "trace.html", args.out)
            return
        run = args.run or _demo(work)
        folder = work / "shown"
        folder.mkdir()
        shutil.copytree(run, folder / "demo")
        with served(folder) as hub, launched("--font-render-hinting=none") as browser:
            for picture in PICTURES:
                if args.only in (None, picture.name):
                    for theme in THEMES:
                        _take(browser, hub, picture, theme, args.out / f"{picture.name}-{theme}.png")
    finally:
        shutil.rmtree(work)


def _demo(work: Path) -> Path:
    command = [sys.executable, "-m", "stepscope", "demo", "--dir", str(work / "runs"), "--steps", "300"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return work / "runs" / "demo"


def _trace(trace: Path, html: Path, out: Path) -> None:
    command = [sys.executable, "-m", "stepscope", "trace", str(trace), "--html", str(html)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with launched("--font-render-hinting=none") as browser:
        for theme in THEMES:
            page = _page(browser, theme, WIDTH, TRACE_HEIGHT)
            page.goto(html.as_uri())
            page.wait_for_selector("main")
            page.wait_for_timeout(CALM_MS)
            _save(page, out / f"trace-{theme}.png")


def _page(browser: Browser, theme: str, width: int, height: int) -> Page:
    context = browser.new_context(
        color_scheme="dark" if theme == "dark" else "light",
        viewport={"width": width, "height": height},
        device_scale_factor=1,
        reduced_motion="reduce",
        locale="en-GB",
    )
    return context.new_page()


def _take(browser: Browser, hub: Hub, picture: Picture, theme: str, to: Path) -> None:
    page = _page(browser, theme, picture.width, picture.height)
    page.add_init_script(COUNTED)
    mark = "&" if "?" in picture.fragment else "?"
    page.goto(f"{hub.url}/#{picture.fragment}{mark}token={hub.token}")
    page.wait_for_selector("main")
    wait_until(page, DRAWN if "/run/" in picture.fragment else "window.__asked === 0")
    page.wait_for_timeout(CALM_MS)
    if picture.do is not None:
        picture.do(page)
        page.wait_for_timeout(CALM_MS)
    _save(page, to)


def _save(page: Page, to: Path) -> None:
    page.screenshot(path=to, animations="disabled", caret="hide")
    page.context.close()
    size = to.stat().st_size
    print(f"{to}: {size / 1e3:.0f} kB")
    if size > MOST_BYTES:
        print(f"{to} is larger than {MOST_BYTES / 1e3:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
