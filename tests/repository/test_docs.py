"""The pages of the documentation: links lead somewhere, commands exist, pages are listed, short and current."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from committed_files import committed_files
from reference_pages import PAGES as GENERATED

from stepscope.cli.main import ALIASES, COMMANDS, OWN, command_module

MOST_WORDS = 1500
"""Of a page outside the reference."""
README_LINES, README_WORDS = 90, 800
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def pages(root: Path) -> dict[str, str]:
    """The text of every page, by its path in the repository."""
    found = [path for path in committed_files(root) if path.suffix == ".md"]
    names = {path.relative_to(root).as_posix(): path for path in found}
    return {name: path.read_text() for name, path in names.items() if not name.startswith("tests/")}


@pytest.fixture(scope="module")
def prepare(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_site", root / "docs/site/prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_code(page: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page))


# ── links ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def anchors(page: str) -> set[str]:
    """As hosts of repositories make them: the second heading of a name gets ``-1``."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} (.*)$", FENCE.sub("", page), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", ""))
        name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {name if number == 0 else f"{name}-{number}" for name, last in found.items() for number in range(last + 1)}


def links(page: str) -> Iterator[str]:
    text = FENCE.sub("", page)
    for match in re.finditer(r'\]\(([^)\s]+)\)|\b(?:src|srcset|href)="([^"]+)"', text):
        if not re.match(r"[a-z]+:", url := match[1] or match[2]):
            yield url


def test_anchors_and_links_are_found() -> None:
    page = "# A `b`-c: d\n## Same\n## Same\n[x](a.md#b) ![y](i.png) [z](https://h/) `[n](o.md)`\n```\n[n](o.md)\n```\n"
    assert anchors(page) == {"a-b-c-d", "same", "same-1"}
    assert list(links(page)) == ["a.md#b", "i.png", "o.md"]


def test_every_link_leads_somewhere(root: Path, pages: dict[str, str]) -> None:
    broken = []
    for name, page in pages.items():
        for url in links(page):
            path, _, anchor = url.partition("#")
            target = os.path.normpath(Path(name).parent / path) if path else name
            if not (root / target).exists() or (anchor and target in pages and anchor not in anchors(pages[target])):
                broken.append(f"{name}: {url}")
    assert broken == []


def test_pages_named_in_the_code_exist(root: Path) -> None:
    """``docs/export.md`` in a message or a comment."""
    missing = set()
    for path in committed_files(root):
        if (
            path.suffix in (".py", ".ts", ".tsx", ".toml", ".yml", ".yaml", ".sh", ".sbatch")
            and "data" not in path.parts
        ):
            for name in re.findall(r"\bdocs/(?:archive/)?[a-z-]+\.md\b", path.read_text(errors="ignore")):
                if not (root / name).is_file():
                    missing.add(f"{path.relative_to(root)}: {name}")
    assert missing == set()


# ── the list of pages ───────────────────────────────────────────────────────────────────────────────────────────────


def test_every_page_is_listed_once(root: Path, prepare: ModuleType) -> None:
    """A new page gets a line in ``docs/README.md`` or ``docs/archive/README.md``, of which the navigation is made."""
    docs = root / "docs"
    nav = prepare.navigation((docs / "README.md").read_text(), (docs / "archive/README.md").read_text())
    assert [next(iter(tab)) for tab in nav] == [
        *("Home", "Tutorials", "How-to guides", "Reference", "Explanations", "Archive"),
    ]
    exist = [path.relative_to(docs).as_posix().replace("README", "index") for path in docs.rglob("*.md")]
    assert sorted(prepare.pages_of(nav)) == sorted(exist)


def test_the_site_is_prepared(prepare: ModuleType, tmp_path: Path) -> None:
    """``make docs`` builds it from this."""
    assert prepare.prepare(tmp_path) == []
    tour = (tmp_path / "docs/tour.md").read_text()
    assert "](running.md#the-api)" in tour
    readme = (tmp_path / "docs/project/readme.md").read_text()
    assert "](../debug-a-hang.md)" in readme
    assert "](../repository/LICENSE.txt)" in readme
    assert (tmp_path / "docs/repository/LICENSE.txt").is_file()
    assert (
        (tmp_path / "docs" / "index.md")
        .read_text()
        .startswith("---\nhide: [navigation]\nsearch:\n  boost: 0.3\n---\n# Stepscope")
    )
    assert '"Getting started": "getting-started.md"' in (tmp_path / "mkdocs.yml").read_text()


def test_pages_outside_the_reference_are_short(root: Path, prepare: ModuleType) -> None:
    docs = root / "docs"
    nav = prepare.navigation((docs / "README.md").read_text(), (docs / "archive/README.md").read_text())
    words = {
        name: len((docs / name.replace("index", "README")).read_text().split())
        for tab in nav
        if "Reference" not in tab
        for name in prepare.pages_of([tab])
    }
    assert {name: count for name, count in words.items() if count > MOST_WORDS} == {}


def test_readme_is_a_screen_and_a_half(root: Path) -> None:
    readme = (root / "README.md").read_text()
    assert len(readme.splitlines()) <= README_LINES
    assert len(readme.split()) <= README_WORDS


def test_every_figure_of_the_readme_has_its_date_and_machine(root: Path) -> None:
    section = (root / "README.md").read_text().partition("## In numbers")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    figures = r"\((?:[^()]|\([^()]*\))*\b\d+ [A-Z][a-z]+ 20\d\d\)"
    assert len(rows) == 5
    assert [row for row in rows if not re.search(figures, re.sub(r"\]\([^)]*\)", "]", row))] == []


def test_figures_of_the_readme_are_in_the_benchmarks(root: Path) -> None:
    """That of the CPU is written by ``make cost``."""
    section = (root / "README.md").read_text().partition("## In numbers")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|") and "<!--" not in line]
    benchmarks = (root / "docs/benchmarks.md").read_text()
    figures = re.findall(r"\d+ of \d+|\+\d+ µs|\d+\.\d+(?:%| s| ms)", " ".join(rows))
    assert len(figures) > 8
    assert [figure for figure in figures if figure not in benchmarks] == []


# ── what is made from the code ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", GENERATED)
def test_reference_is_current(root: Path, name: str) -> None:
    """Run ``make reference`` after a change of options, or of what ``import stepscope`` offers."""
    assert (root / name).read_text() == GENERATED[name]()


def test_every_command_is_in_the_tour(root: Path) -> None:
    tour = (root / "docs/tour.md").read_text()
    assert [
        name for name in COMMANDS if not re.search(rf"^(?:STEPSCOPE=0 )?stepscope {name}\b", tour, re.MULTILINE)
    ] == []


# ── pictures ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_picture_of_the_terminal_has_the_labels_of_today(root: Path) -> None:
    """Draw it again with ``bench/terminal_picture.py`` when the view has changed."""
    drawn = (root / "docs/images/terminal.svg").read_text()
    begins = [html.unescape(text).replace("\xa0", " ") for text in re.findall(r'<text[^>]* x="0"[^>]*>([^<]*)', drawn)]
    labels = {text.strip() for text in begins if re.fullmatch(r" *[a-z]+(?: [a-z]+)? +", text)}
    view = "".join(path.read_text() for path in (root / "src/stepscope/terminal").glob("*.py"))
    assert {"to do", "step", "machine"} <= labels
    assert [label for label in sorted(labels) if f'"{label}"' not in view] == []


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────────

PLACEHOLDER = re.compile(r"…|\.\.\.")


def commands(page: str) -> Iterator[str]:
    """Every ``stepscope …`` of a page: in blocks, in the lines of a shell; in prose, in backticks."""
    for language, block in FENCE.findall(page):
        if language in ("", "sh", "bash", "console", "yaml"):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                yield from _in_a_shell(line)
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", page)):
        yield from _in_a_shell(" ".join(code.split()))


def _in_a_shell(line: str) -> Iterator[str]:
    """The command of a line, without prompt, variables, launchers before it and what follows it."""
    line = re.sub(r"^\s*\$ ", "", line).strip()
    match = re.match(r"(?:[A-Z_]+=\S* )*(?:srun (?:-\S+(?: \d+)? )*)?stepscope (?=[a-z-]+(?:\s|$))(.*)", line)
    if match and not PLACEHOLDER.match(match[1]):
        yield match[1]


def words_of(command: str) -> list[str] | None:
    """None: a quotation goes on in the next line."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=";|&>")
    lexer.whitespace_split = True
    words = []
    try:
        for word in lexer:
            if set(word) <= set(";|&>"):
                break
            words.append(word)
    except ValueError:
        return None
    return words


def problem(command: str) -> str:
    """What the command line has against a command; empty: nothing."""
    words = words_of(command)
    if words is None:
        return ""
    name = ALIASES.get(words[0], words[0])
    if name not in (*COMMANDS, *OWN):
        return f"no command {words[0]}"
    if name in OWN:
        return ""
    module = command_module(name)
    options = [word.partition("=")[0] for word in words[1:] if word.startswith("-") and word != "-"]
    if hasattr(module, "OPTIONS_BEFORE_JOB"):
        own = []
        rest = iter(words[1:])
        for word in rest:
            if not word.startswith("-") or word == "-m":
                break
            own.append(word.partition("=")[0])
            if "=" not in word and own[-1] in module.OPTIONS_BEFORE_JOB:
                next(rest, None)
        options = own
    known = options_by_command()[name]
    unknown = [option for option in options if option not in known and not PLACEHOLDER.search(option)]
    return f"no option {', '.join(unknown)}" if unknown else ""


@cache
def options_by_command() -> dict[str, set[str]]:
    """Those of the reference, which is made from the parsers."""
    sections = re.split(r"^## stepscope (\S+)$", GENERATED["docs/cli-reference.md"](), flags=re.MULTILINE)
    listed_in = zip(sections[1::2], sections[2::2], strict=True)
    return {name: {"-h", "--help", *re.findall(r"`(-[\w-]+)", section)} for name, section in listed_in}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("run --name first train.py --epochs 3", ""),
        ("run --nproc-per-node 4 train.py", ""),
        ("run --bad train.py", "no option --bad"),
        ("dance", "no command dance"),
        ("ls --json | head", ""),
        ("trace a --shiny=3", "no option --shiny"),
        ("alerts silence --run night --for 2h", ""),
    ],
)
def test_commands_are_checked(command: str, expected: str) -> None:
    assert problem(command) == expected


def test_commands_are_found() -> None:
    block = "```\n$ stepscope list\nstepscope: x\nA=1 stepscope demo\n```\n"
    page = f"`stepscope run a.py`, `stepscope …`, `stepscope.step()`\n{block}"
    assert list(commands(page)) == ["list", "demo", "run a.py"]


def test_every_command_in_a_page_exists(pages: dict[str, str]) -> None:
    wrong = []
    for name, page in pages.items():
        if name != "CHANGELOG.md":  # what a version had stays what it had
            wrong += [f"{name}: stepscope {text}: {found}" for text in commands(page) if (found := problem(text))]
    assert wrong == []
