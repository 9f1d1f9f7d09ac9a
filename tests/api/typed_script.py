"""What a user writes; ``make types`` checks it with ``mypy --strict``, so that the shipped types can be used."""

from __future__ import annotations

import sys

import stepscope
from stepscope import Comparison, Frame, Run
from stepscope.errors import StepscopeError
from stepscope.traces import TraceSet


def slowest_step(run: Run) -> int:
    steps: Frame = run.steps()
    return int(steps["step"][steps["wall_ns"].argmax()])


def main() -> str:
    try:
        run = stepscope.open("night")
    except StepscopeError as error:
        return str(error)
    result: Comparison = stepscope.compare(["before", run], "after", only=True)
    traces: TraceSet = stepscope.traces.open("traces/")
    titles = [str(row["title"]) for frame in (run.findings(), traces.findings()) for row in frame.rows()]
    verdict: str = run.verdict if result.verdict == "slower" else result.title
    return "\n".join([verdict, f"{result.change:+.1%}", f"{slowest_step(run)}", *titles])


if __name__ == "__main__":
    sys.exit(main())
