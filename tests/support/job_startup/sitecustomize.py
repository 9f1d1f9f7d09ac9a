"""Every Python process that a test starts runs this file first, because its folder is in PYTHONPATH.

**Torch's compiler is loaded only where it is used**, so that torch jobs start in half the time.  An optimizer imports
``torch._dynamo`` in its first step, which takes as long as torch itself, and then calls three functions of it that do
nothing outside of a compiled region.  Those are here; asking for anything else, or importing a module below it, loads
the real one in its place.  ``make soak`` and ``make versions`` run without this (``STEPSCOPE_WHOLE_TORCH``).

**Jobs do not hang at their end.**  During backward, torch 2.13 keeps a Python object with every exchange that DDP
starts.  A thread of gloo releases it, for which it needs the GIL; a script that drops its model after
``destroy_process_group()`` joins that thread with the GIL held.  A job that ends right after its last backward hangs in
four of ten runs, with and without Stepscope.  The object carries settings of the compiler to the threads of GPUs, which
no job here has, so it is not kept.  (Scripts avoid it by dropping the model first, as those in ``bench/`` do.)

This imports nothing that is not loaded anyway.
"""

import os
import sys

NAME = "torch._dynamo"
BACKWARD = "torch.autograd.graph"


class LateModule(type(sys)):
    """A module that is loaded when a name is asked for that is not in ``known``."""

    def __init__(self, name, **known):
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name):
        # Asked for by the import system; __path__ once more by whoever imports a module below this one.
        if name.startswith("__") and not (name == "__path__" and NAME in sys.modules):
            raise AttributeError(name)
        return getattr(real(self.__name__), name)


def disable(fn=None, recursive=True, **_how):
    return fn if fn is not None else lambda fn: fn


def real(name):
    """The module itself; from now on it is the one that everybody finds."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        del sys.modules[NAME]
    import importlib

    return importlib.import_module(name)


class Finder:
    """Finds ``torch._dynamo``, and nothing else."""

    def find_spec(self, name, path=None, target=None):
        # A torch that a test has made up has its own.
        if name != NAME or not os.path.isfile(os.path.join(path[0], "_dynamo", "eval_frame.py")):
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)

    def create_module(self, spec):
        utils = LateModule(f"{NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        rules = LateModule(f"{NAME}.trace_rules", clear_lru_cache=lambda: None)
        return LateModule(NAME, disable=disable, graph_break=lambda *_: None, utils=utils, trace_rules=rules)

    def exec_module(self, module):
        pass


class BackwardFinder:
    """Finds the module that keeps the object, and makes it not to."""

    def find_spec(self, name, path=None, target=None):
        if name != BACKWARD:
            return None
        from importlib.machinery import PathFinder

        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                keep = getattr(module.torch._C, "_stash_obj_in_tls", None)
                if keep is not None:
                    module.torch._C._stash_obj_in_tls = lambda key, what: key == "context" or keep(key, what)

            spec.loader.exec_module = exec_module
        return spec


FINDER = Finder()
if "STEPSCOPE_WHOLE_TORCH" not in os.environ:
    sys.meta_path.insert(0, FINDER)
sys.meta_path.insert(0, BackwardFinder())
