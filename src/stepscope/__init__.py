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

All of it does nothing when ``STEPSCOPE=0``. Importing this module imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.notebook.cells import live, show
    from stepscope.recorder.api import init, note, phase, step, summary, watch

__version__ = "0.4.0"

__all__ = ["__version__", "init", "live", "note", "phase", "show", "step", "summary", "watch"]

_FOUND_IN = {"live": "stepscope.notebook.cells", "show": "stepscope.notebook.cells"}
"""All other names are defined in the recorder."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_FOUND_IN.get(name, "stepscope.recorder.api")), name)
    raise AttributeError(f"module 'stepscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
