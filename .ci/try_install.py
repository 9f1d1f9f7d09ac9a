"""Install what was built into an empty environment of each Python, as a user would, and use it there without torch.

    python .ci/try_install.py dist/*.whl                       # with every Python that pyproject.toml claims
    python .ci/try_install.py dist/*.tar.gz --pythons 3.12     # from the source distribution
    python .ci/try_install.py git+file://$PWD                  # from a clone

The path has no Node.js.  Each environment records a script, lists the run, writes its report.html and serves the page.
Dependencies are downloaded.  Pythons are those of pyenv and ``python3.N`` on the path; others are listed as not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("cc", "gcc", "ld", "as", "git", "git-upload-pack", "sh", "bash", "env", "basename", "sed", "uname")
"""What is on the path beside the environment, where it exists: a compiler, git and what its scripts call."""
LIMIT_S = 600
PAGE_DATA = 'id="stepscope-data"'
PAGE_SCRIPT = '<script type="module"'


class Failed(Exception):
    """A step did not do what it should."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", metavar="WHEEL", help="what to give to pip install")
    parser.add_argument(
        "--pythons", nargs="+", default=claimed_pythons(), help="versions (default: all that are claimed)"
    )
    args = parser.parse_args()
    what = args.what if "://" in args.what else str(Path(args.what).resolve(strict=True))
    verdicts = {}
    for version in args.pythons:
        python = find_python(version)
        if python is None:
            verdicts[version] = "not found"
            continue
        try:
            verdicts[version] = try_install(python, what)
        except Failed as error:
            verdicts[version] = f"failed: {error}"
        print(f"Python {version}: {verdicts[version]}", flush=True)
    missing = [version for version, verdict in verdicts.items() if verdict == "not found"]
    if missing:
        print(f"not found: Python {', '.join(missing)}")
    sys.exit(any(verdict.startswith("failed") for verdict in verdicts.values()) or len(missing) == len(verdicts))


def claimed_pythons() -> list[str]:
    return re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())


def find_python(version: str) -> str | None:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [path for path in [shutil.which(f"python{version}")] if path is not None]
    found += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for python in reversed(found):
        if subprocess.run([python, "-m", "ensurepip", "--version"], capture_output=True, check=False).returncode == 0:
            return python
    return None


def try_install(python: str, what: str) -> str:
    """Install, use and remove it; return a line about it."""
    with tempfile.TemporaryDirectory(prefix="stepscope-install-") as name:
        folder = Path(name)
        programs = folder / "bin"
        programs.mkdir()
        for program in NEEDED:
            if (found := shutil.which(program)) is not None:
                (programs / program).symlink_to(found)
        run([python, "-m", "venv", "venv"], folder, dict(os.environ))
        environment = {
            **{key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "PATH": f"{folder / 'venv/bin'}:{programs}",
            "HOME": name,
            "XDG_CONFIG_HOME": str(folder / "config"),
        }
        started = time.monotonic()
        run(["venv/bin/pip", "install", "--quiet", what], folder, environment)
        installed_s = time.monotonic() - started
        return f"{use(folder, environment)}, installed in {installed_s:.0f} s"


def use(folder: Path, environment: dict[str, str]) -> str:
    """Record, list, report and serve; return the version."""
    version = run(["stepscope", "--version"], folder, environment).split()[-1]
    (folder / "script.py").write_text("print('trained')\n")
    run(["stepscope", "run", "--name", "first", "script.py"], folder, environment)
    if "first" not in run(["stepscope", "list"], folder, environment):
        raise Failed("`stepscope list` does not show the run")
    run(["stepscope", "report", "first", "--html", "report.html"], folder, environment)
    if PAGE_DATA not in (folder / "report.html").read_text():
        raise Failed("report.html has no data")
    with subprocess.Popen(
        ["venv/bin/stepscope", "serve", "--port", "0", "--until-eof"],
        cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout and server.stderr and server.stdin
        url = server.stdout.readline().strip()
        page = urllib.request.urlopen(url, timeout=60).read().decode() if url else server.stderr.read()
        server.stdin.close()
    if PAGE_SCRIPT not in page:
        raise Failed(f"`stepscope serve` has no page: {page}")
    return f"stepscope {version}"


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    # It would be looked for in the path of this process.
    program = shutil.which(command[0], path=environment["PATH"]) or command[0]
    done = subprocess.run(
        [program, *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


if __name__ == "__main__":
    main()
