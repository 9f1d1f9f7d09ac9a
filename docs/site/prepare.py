"""Prepare the documentation for a generator of sites: all pages with links that work there, and the navigation.

    make docs               # prepares build/docs and build/mkdocs.yml, then builds build/site

The pages are written for a reader of the repository.  ``docs/README.md`` lists them all: its second-level headings
become the tabs, its tables the entries below them.  A link that leaves docs/ leads to a page if the file is one of
``PROJECT_PAGES``, and else to a copy of the file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

__all__ = ["PROJECT_PAGES", "main", "navigation", "pages_of", "prepare"]

ROOT = Path(__file__).resolve().parents[2]
PROJECT_PAGES = {
    "README.md": "project/readme.md",
    "ROADMAP.md": "project/roadmap.md",
    "CHANGELOG.md": "project/changelog.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "project/examples.md",
    "bench/README.md": "project/benchmark-scripts.md",
}
"""Pages outside of docs/, and their place in the site."""
OTHER_TITLES = {
    "README.md": "README",
    "SECURITY.md": "Security policy",
    "bench/README.md": "Benchmark scripts",
    "examples/README.md": "Example scripts",
}
LINK = re.compile(r'(?P<before>\]\(|\b(?:src|srcset|href)=")(?P<url>[^)\s"]+)')
FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)
WEIGHTS = {"Home": 0.3, "Tutorials": 2, "How-to guides": 2, "Explanations": 1.5, "Archive": 0.2, "Project": 0.2}
"""Of pages in the search, by their tab; others: 1."""
PICTURES = (".html", ".svg", ".png")
Entries = list[dict[str, Any]]


def navigation(index: str, archive: str) -> Entries:
    """Tabs and entries, from the headings, tables and links of ``docs/README.md`` and of the archive's list."""
    found: Entries = [{"Home": "index.md"}]
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        entries: Entries = []
        for table in re.split(r"\n\n(?=\|)", body.strip()):
            heading = re.match(r"\|\s*(.*?)\s*\|", table)
            pages = [{text.replace("`", ""): page} for text, page in _listed(table)]
            if heading and heading[1] not in ("", "page") and pages:
                entries.append({heading[1][0].upper() + heading[1][1:]: pages})
            else:
                entries += pages
        if title == "Archive":
            entries = [{"Overview": "archive/index.md"}, *({t: f"archive/{page}"} for t, page in _listed(archive))]
        found.append({title: entries})
    return found


def _listed(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^\| \[([^\]]+)\]\(([\w/-]+\.md)\)", text, flags=re.MULTILINE)


def pages_of(entries: Entries) -> list[str]:
    """All pages of some entries, in order."""
    values = [value for entry in entries for value in entry.values()]
    return [page for value in values for page in ([value] if isinstance(value, str) else pages_of(value))]


class _Site:
    """The folder from which the site is built."""

    def __init__(self, folder: Path, nav: Entries) -> None:
        self.folder = folder
        self.weights = {page: WEIGHTS.get(title, 1) for tab in nav for title in tab for page in pages_of([tab])}
        self.missing: list[str] = []

    def add_page(self, origin: str, place: str) -> None:
        """A page of the repository, with links that work from its place."""
        parts = FENCE.split((ROOT / origin).read_text())
        for number, part in enumerate(parts):
            if not part.startswith("```"):
                text = part.replace("<details>", '<details markdown="1">')
                parts[number] = LINK.sub(lambda match: match["before"] + self._link(match["url"], origin, place), text)
        hidden = "hide: [navigation]\n" if place == "index.md" else ""
        top = f"---\n{hidden}search:\n  boost: {self.weights.get(place, WEIGHTS['Project'])}\n---\n"
        self._write(place, (top + "".join(parts)).encode())

    def _link(self, url: str, origin: str, place: str) -> str:
        path, mark, anchor = url.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return url
        target = os.path.normpath(Path(origin).parent / path)
        if not (ROOT / target).exists():
            self.missing.append(f"{origin}: {url}")
            return url
        return os.path.relpath(self._place_of(target), Path(place).parent) + mark + anchor

    def _place_of(self, target: str) -> str:
        if (ROOT / target / "README.md").is_file():
            target = f"{target}/README.md"
        if target in PROJECT_PAGES:
            return PROJECT_PAGES[target]
        if target.startswith("docs/"):
            return re.sub(r"(^|/)README\.md$", r"\1index.md", target.removeprefix("docs/"))
        # The copy of a file, or the list of a folder's files.
        path = ROOT / target
        place = f"repository/{target}" + ("" if target.endswith(PICTURES) else ".txt")
        if path.is_dir():
            names = sorted(inner.relative_to(ROOT).as_posix() for inner in path.rglob("*") if inner.is_file())
            self._write(place, "".join(f"{name}\n" for name in names if "__pycache__" not in name).encode())
        else:
            self._write(place, path.read_bytes())
        return place

    def _write(self, place: str, content: bytes) -> None:
        (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / place).write_bytes(content)


def prepare(build: Path) -> list[str]:
    """Write ``build/docs`` and ``build/mkdocs.yml``; return the links that lead nowhere."""
    shutil.rmtree(build / "docs", ignore_errors=True)
    docs = ROOT / "docs"
    nav = navigation((docs / "README.md").read_text(), (docs / "archive/README.md").read_text())
    site = _Site(build / "docs", nav)
    for path in sorted(docs.rglob("*")):
        name = path.relative_to(docs).as_posix()
        if path.is_file() and not name.startswith("site/"):
            if path.suffix == ".md":
                site.add_page(f"docs/{name}", re.sub(r"(^|/)README\.md$", r"\1index.md", name))
            else:
                (build / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, build / "docs" / name)
    project: Entries = []
    for origin, place in PROJECT_PAGES.items():
        if (ROOT / origin).is_file():
            site.add_page(origin, place)
            title = OTHER_TITLES.get(origin) or (ROOT / origin).read_text().partition("\n")[0].lstrip("# ")
            project.append({title: place})
    for name in ("style.css", "iframe-worker.js"):
        shutil.copyfile(docs / "site" / name, build / "docs" / name)
    settings = (docs / "site/mkdocs.yml").read_text()
    # JSON is YAML.
    (build / "mkdocs.yml").write_text(f"{settings}\nnav: {json.dumps([*nav, {'Project': project}], indent=1)}\n")
    return site.missing


def main() -> int:
    missing = prepare(ROOT / "build")
    for link in missing:
        print(f"leads nowhere: {link}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
