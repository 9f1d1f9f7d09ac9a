"""Stepscope: find the rank and the phase that slow down a PyTorch run, and what they cost.

Most users never import this: ``stepscope run train.py`` needs no change to the script. For more control:

    import stepscope

    stepscope.init()                      # under plain torchrun: start recording (a no-op under `stepscope run`)
    with stepscope.step():                # explicit step boundaries
        with stepscope.phase("augment"):  # a custom phase; also works as a decorator
            ...
    stepscope.note(loss=0.3)              # a value recorded with the step
    stepscope.watch(model)                # the model whose layers are sampled, if it is not the one that is called
    stepscope.summary()                   # the summary so far, with the contents of summary.json
    stepscope.live()                      # in a notebook that trains: record, and show the live page in the cell
    stepscope.show("night")               # in any notebook: the page of a run

Recorded runs and traces, in any other process (docs/python-api.md):

    run = stepscope.open("night")         # finished, killed or still active: run.verdict, run.steps(), run.findings() …
    stepscope.compare("before", "after")  # is a run slower, by how much, and where
    stepscope.traces.open("traces/")      # traces of torch.profiler and Nsight Systems

The recording functions do nothing when ``STEPSCOPE=0``. Importing this module imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope import errors as errors
    from stepscope import traces as traces
    from stepscope.api import Comparison as Comparison
    from stepscope.api import Run as Run
    from stepscope.api import compare as compare
    from stepscope.api import open as open  # noqa: A004
    from stepscope.frame import Frame as Frame
    from stepscope.notebook.cells import live, show
    from stepscope.recorder.api import init, note, phase, step, summary, watch

__version__ = "0.4.0"

__all__ = ["__version__", "init", "live", "note", "phase", "show", "step", "summary", "watch"]
"""What ``from stepscope import *`` brings into a training script; ``open`` would replace Python's own there."""

_DEFINED_IN = {
    "Comparison": "stepscope.api",
    "Frame": "stepscope.frame",
    "Run": "stepscope.api",
    "compare": "stepscope.api",
    "live": "stepscope.notebook.cells",
    "open": "stepscope.api",
    "show": "stepscope.notebook.cells",
}
"""All other functions are defined in the recorder."""
_MODULES = ("errors", "traces")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"stepscope.{name}")
    if name in _DEFINED_IN or name in __all__:
        return getattr(import_module(_DEFINED_IN.get(name, "stepscope.recorder.api")), name)
    raise AttributeError(f"module 'stepscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_DEFINED_IN, *_MODULES})
