"""What an exporter whose server never answers costs the training: the same loop recorded without and with ``--to``.

    python bench/exporters.py                          # about ten minutes
    python bench/exporters.py --to tensorboard:logs    # of a tool that works

The server is a socket that takes connections until its queue is full and reads nothing: then a connection is not even
refused, as behind a firewall that drops packets.  ``none again`` is the same as ``none``: what differs between these
two is noise.  The loop lasts some 30 seconds, so that the exporter, which writes every ten, makes its calls meanwhile.
"""

from __future__ import annotations

import argparse
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from harness import StepscopeTool, measure, print_size, save

WORKLOAD = "5"


@dataclass(frozen=True, kw_only=True)
class Exporting(StepscopeTool):
    to: str = ""

    def command(self, script: list[str], work: Path) -> list[str]:
        words = super().command(script, work)
        at = words.index("--dir")
        return [*words[:at], "--to", self.to or "off", *words[at:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", metavar="TOOL[:WHERE],…", help="default: MLflow and OTLP, to servers that never answer")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--warm", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single result there")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        to = args.to or f"mlflow:{url},otlp:{url}"
        tools = [
            Exporting(name=name, python=sys.executable, baseline="none", to=where)
            for name, where in (("none", ""), ("none again", ""), ("exporter", to))
        ]
        rows = measure(tools, WORKLOAD, args)
    print_size(f"--to {to}: {args.steps} steps x {args.repeats} repeats", tools, rows)
    if args.json:
        save(args.json, tools, {WORKLOAD: rows}, args)


if __name__ == "__main__":
    main()
