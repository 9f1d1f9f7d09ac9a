"""The reader of traces in C beside the one in Python, on millions of damaged events, under sanitizers.

    python bench/trace_fuzz.py --seconds 600
    python bench/trace_fuzz.py --seconds 600 --traces ../shared/data/traces --keep found
    python bench/trace_fuzz.py --plain                  # with the scanner as it was built, without sanitizers

Compiles ``native_scan.c`` with AddressSanitizer and UndefinedBehaviorSanitizer, loads it into a Python whose memory
comes from malloc, and reads real and made events with odd values, in odd places, or with damaged bytes. Stops at the
first difference between the readers, or at the first access out of bounds. ``make fuzz`` runs it for a minute.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import importlib.util
import json
import os
import pickle
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from pathlib import Path

from fakes.damaged_traces import BLOCKS, Event, damaged_text, differences, fields_of, full_trace, odd_document

from stepscope.traces.reading import scanned
from stepscope.traces.reading.kineto import SETTINGS

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "stepscope" / "traces" / "reading" / "native_scan.c"
REAL = ROOT / "tests" / "traces" / "data"
COMPILE = (
    *("gcc", "-std=c11", "-O1", "-g", "-fno-omit-frame-pointer", "-fPIC", "-shared"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
BUILT = "STEPSCOPE_FUZZED_SCANNER"
"""For the process that fuzzes: the file to load."""
LARGEST = 64 << 20
"""Bytes of a trace; of larger ones the first."""
OF_A_FILE = 1000
"""Events."""
ALONE = 100
"""Texts for the scanner alone, for each that both readers read."""


def built_with_sanitizers(folder: Path) -> Path | None:
    """None without a compiler that has sanitizers."""
    built = folder / "native_scan.abi3.so"
    include = f"-I{sysconfig.get_paths()['include']}"
    try:
        done = subprocess.run(
            [*COMPILE, include, str(SOURCE), "-o", str(built)], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    print(done.stderr.strip()[-1000:], end="")
    return built if done.returncode == 0 else None


def run_again(built: Path, arguments: list[str], sources: list[list[Event]]) -> int:
    """In a process that loads the sanitizer before anything else."""
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = os.environ | {
        "LD_PRELOAD": str(Path(library.stdout.strip()).resolve()),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        BUILT: str(built),
    }
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    return subprocess.run(command, env=environment, input=pickle.dumps(sources), check=False).returncode


def load(built: str) -> None:
    """In place of the scanner that was built with the package."""
    name = "stepscope.traces.reading.native_scan"
    spec = importlib.util.spec_from_file_location(name, built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module


def real_events(folders: list[Path]) -> list[list[Event]]:
    """By file; a part of each."""
    files = sorted(file for folder in folders for file in folder.rglob("*.json.gz"))
    found = []
    for path in files:
        with gzip.open(path) as file:
            events = json.loads(file.read(LARGEST) if path.stat().st_size < LARGEST // 8 else b"{}").get(
                "traceEvents", []
            )
        stride = max(1, len(events) // OF_A_FILE)
        begin = len(events) // 2 if stride > 1 else 0
        found.append([fields_of(event) for event in events[begin : begin + OF_A_FILE]])
    return [events for events in found if events]


def fuzz(sources: list[list[Event]], args: argparse.Namespace) -> int:
    """Read odd texts twice, and many more by the scanner alone, which is quicker and needs no second reader."""
    random_ = random.Random(args.seed)
    scan = scanned.scanner_function()
    if scan is None:
        print("the scanner was not built")
        return 1
    scanner = scanned.Scanner(scan, SETTINGS.search)
    document = full_trace().text()
    args.keep.mkdir(parents=True, exist_ok=True)
    last = args.keep / "last.json"
    number = os.open(last, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def note(text: bytes) -> None:
        """So that a text that ends the process is there."""
        os.pwrite(number, text, 0)
        os.ftruncate(number, len(text))

    counts: collections.Counter[str] = collections.Counter()
    warnings.simplefilter("error")
    ends = time.process_time() + args.seconds
    while time.process_time() < ends:
        source = random_.choice(sources)
        text = odd_document(random_, source, odd=(0, 0, 1))
        for _ in range(ALONE):
            damaged = damaged_text(random_, text[text.index(b"[") : text.rindex(b"]") + 1])
            note(damaged)
            counts["ordinary"] += scanner(damaged) is not None
        text = document if random_.random() < 0.1 else odd_document(random_, source)
        if random_.random() < 0.3:
            text = damaged_text(random_, text)
        size = random_.choice(BLOCKS)
        note(text)
        counts["texts"] += 1
        counts["bytes"] += len(text)
        different = differences(text, size)
        if different:
            kept = args.keep / f"different-{args.seed}-{counts['texts']}.json"
            kept.write_bytes(text)
            print(f"blocks of {size}: {', '.join(different)}: {kept}")
            counts["different"] += 1
            if not args.all:
                break
    os.close(number)
    print(
        f"seed {args.seed}: {counts['texts']:,} texts of {counts['bytes'] / 1e6:.1f} MB from {len(sources)} files,"
        f" {counts['different']} read differently; the scanner alone: {ALONE * counts['texts']:,},"
        f" {counts['ordinary']:,} of them without a fault"
    )
    return int(counts["different"] > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of CPU time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="(default: another one each time)")
    parser.add_argument("--traces", type=Path, action="append", default=[REAL], help="folders of real traces")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", default=ROOT / "build" / "fuzz", help="the texts that failed"
    )
    parser.add_argument("--all", action="store_true", help="do not stop at the first difference")
    parser.add_argument("--plain", action="store_true", help="without sanitizers")
    args = parser.parse_args()
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(10**9)
    if built := os.environ.get(BUILT):
        load(built)
        return fuzz(pickle.loads(sys.stdin.buffer.read()), args)
    sources = real_events(args.traces)
    if args.plain:
        return fuzz(sources, args)
    with tempfile.TemporaryDirectory(prefix="stepscope-fuzz-") as temporary:
        compiled = built_with_sanitizers(Path(temporary))
        if compiled is None:
            print("no C compiler with sanitizers; skipping the scanner of traces")
            return 0
        return run_again(compiled, [*sys.argv[1:], f"--seed={args.seed}"], sources)


if __name__ == "__main__":
    sys.exit(main())
