"""Builds the page (web/build_page.py), and the parts in C if there is a compiler. All of these may be missing.

python hatch_build.py      # builds the parts in C in place, as an editable install does
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "web"))

import build_page  # noqa: E402

WITHOUT = {
    Path("src/stepscope/traces/reading/native_scan.c"): "traces are read by Python alone, at less than half the speed",
    Path("src/stepscope/traces/model/native_calls.c"): "the call trees of traces are built by numpy",
    Path("src/stepscope/recorder/hooks/native_hooks.c"): "all hooks are in Python",
}
"""The sources, each a module of its own, and what is the case without them."""
BUILT_SUFFIX = ".abi3.so"
PURE = "STEPSCOPE_PURE_PYTHON"
LIMIT_S = 300


class CompileHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return ["pip"] if build_page.needs_download(Path(self.root)) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the page; compile, and make the wheel one of this platform; without a compiler it stays one for all."""
        reason = build_page.ensure_page(Path(self.root))
        if reason:
            self.app.display_warning(f"The page was not built: {reason}")
        if self.target_name != "wheel":
            return
        missing = compiled(Path(self.root))
        for reason in sorted(set(missing.values())):
            consequences = "; ".join(WITHOUT[source] for source in missing if missing[source] == reason)
            self.app.display_warning(f"Not built in C: {consequences} ({reason}).")
        built = [source.with_suffix(BUILT_SUFFIX) for source in WITHOUT if source not in missing]
        if built:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp310-abi3-{platform}"
            build_data["pure_python"] = False
            build_data["artifacts"] += [path.as_posix() for path in built]


def compiled(root: Path) -> dict[Path, str]:
    """Build the parts in C in place; return why that was not possible, by source."""
    reasons = {}
    for source in WITHOUT:
        built = root / source.with_suffix(BUILT_SUFFIX)
        reason = _compiled(root / source, built)
        if reason:
            built.unlink(missing_ok=True)  # of an older source
            reasons[source] = reason
    return reasons


def _compiled(source: Path, built: Path) -> str:
    if os.environ.get(PURE):
        return f"{PURE} is set"
    if sys.platform != "linux" or sys.implementation.name != "cpython":
        return "the parts in C are for CPython on Linux"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "the parts in C need a Python with a GIL"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "") or ["cc"]
    unfinished = built.with_suffix(f".{os.getpid()}")
    command = [
        *compiler, "-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fstack-protector-strong",
        f"-I{sysconfig.get_paths()['include']}", str(source), "-o", str(unfinished),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            lines = done.stderr.splitlines() or ["failed"]
            return f"{compiler[0]}: {next((line for line in lines if 'error' in line), lines[0])}"
        unfinished.replace(built)
    except OSError as error:
        return f"no C compiler ({compiler[0]}: {error.strerror})"
    except subprocess.TimeoutExpired:
        return f"{compiler[0]} took too long"
    finally:
        unfinished.unlink(missing_ok=True)
    return ""


if __name__ == "__main__":
    missing = compiled(ROOT)
    for line in dict.fromkeys(missing.get(source) or f"built {source.with_suffix(BUILT_SUFFIX)}" for source in WITHOUT):
        print(line)
    sys.exit(bool(missing))
