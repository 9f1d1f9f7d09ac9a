"""Run by the interpreter at the start of every Python process of a ``stepscope run``.

Starts the recorder, then runs the user's own ``sitecustomize`` as if this file were not here.  It must work in any
environment the job may start: Stepscope itself is loaded from the location of this file, not from ``sys.path``, which
is left unchanged.  If the script has its own module named ``stepscope``, that one is what it imports, and ours is
loaded as ``_stepscope``.
"""

import builtins
import importlib
import importlib.util
import os
import sys

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PRIVATE = "_stepscope"


def _has_own_stepscope():
    """Whether the script will find another module named ``stepscope``: next to it, or on PYTHONPATH."""
    words, folders = sys.orig_argv[1:], os.environ.get("PYTHONPATH", "").split(os.pathsep)
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        words = words[2 if words[0] in ("-W", "-X") else 1 :]
    script = words[0] if words and not words[0].startswith("-") else ""
    folders.insert(0, os.path.dirname(os.path.realpath(script)) if script else "")
    for folder in folders:
        for file in ("stepscope.py", os.path.join("stepscope", "__init__.py")):
            path = os.path.join(folder, file)
            if os.path.exists(path):  # the first one is what the script gets
                return not os.path.samefile(path, os.path.join(_PACKAGE, "__init__.py"))
    return False


class _PrivateFinder:
    """Finds our modules under a name of their own; in them, ``import stepscope`` means that name."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(_PRIVATE + "."):
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        return None if spec is None else _prepared(spec)


def _prepared(spec):
    execute = spec.loader.exec_module

    def exec_module(module):
        module.__dict__["__builtins__"] = _BUILTINS
        execute(module)

    spec.loader.exec_module = exec_module
    return spec


def _import(name, namespace=None, local=None, fromlist=(), level=0):
    if level == 0 and (name == "stepscope" or name.startswith("stepscope.")):
        name = "_" + name
    return __import__(name, namespace, local, fromlist, level)


_BUILTINS = {**vars(builtins), "__import__": _import}


def _load_stepscope(name):
    """Make ``import NAME`` find the package of this file, in any environment."""
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(_PACKAGE, "__init__.py"), submodule_search_locations=[_PACKAGE]
    )
    if name == _PRIVATE:
        sys.meta_path.insert(0, _PrivateFinder())
        _prepared(spec)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
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
        _name = _PRIVATE if _has_own_stepscope() else "stepscope"
        if _name not in sys.modules:
            _load_stepscope(_name)
        start_from_environment = importlib.import_module(_name + ".recorder.bootstrap").start_from_environment
    except Exception as error:  # noqa: BLE001 - a process that cannot be recorded must still run
        sys.stderr.write("stepscope: this process is not recorded: %r\n" % (error,))
    else:
        start_from_environment()
_chain()
