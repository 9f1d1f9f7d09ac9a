"""Run by the interpreter at the start of every Python process of a ``stepscope run``.

Starts the recorder, then runs the user's own ``sitecustomize`` as if this file were not here.  It must work in any
environment the job may start: Stepscope itself is loaded from the location of this file, not from ``sys.path``, which
is left unchanged.
"""

import importlib.util
import os
import sys


def _load_stepscope():
    """Make ``import stepscope`` find the package of this file, in any environment."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    spec = importlib.util.spec_from_file_location(
        "stepscope", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["stepscope"] = module
    spec.loader.exec_module(module)


def _chain():
    """Run the sitecustomize that would have run without us."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    ours = sys.modules.pop("sitecustomize", None)
    spec = importlib.util.find_spec("sitecustomize")
    if spec is None:
        sys.modules["sitecustomize"] = ours
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("STEPSCOPE") != "0" and sys.version_info >= (3, 10):
    try:
        if "stepscope" not in sys.modules:
            _load_stepscope()
        from stepscope.recorder.bootstrap import start_from_environment
    except Exception as error:  # noqa: BLE001 - a process that cannot be recorded must still run
        sys.stderr.write("stepscope: this process is not recorded: %r\n" % (error,))
    else:
        start_from_environment()
_chain()
