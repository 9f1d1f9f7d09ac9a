"""Every Python process that a test starts runs this file first, because its folder is in PYTHONPATH.

**Torch's compiler is loaded only where it is used**, so that torch jobs start in half the time.  An optimizer imports
``torch._dynamo`` in its first step, which takes as long as torch itself, and then calls three functions of it that do
nothing outside of a compiled region.  Those are here; asking for anything else, or importing a module below it, loads
the real one in its place.  So it is with ``torch._meta_registrations``, a quarter of what importing torch takes: what
operators do without data, for the compiler and for DTensor, whose modules load it.  The objects of torch itself are
left out of garbage collection, which at the end of a process takes a quarter of a second for them.  ``make soak`` and
``make versions`` run without this (``STEPSCOPE_WHOLE_TORCH``).

**Jobs do not hang at their end.**  During backward, torch 2.13 keeps a Python object with every exchange that DDP
starts.  A thread of gloo releases it, for which it needs the GIL; a script that drops its model after
``destroy_process_group()`` joins that thread with the GIL held.  A job that ends right after its last backward hangs in
four of ten runs, with and without Stepscope.  The object carries settings of the compiler to the threads of GPUs, which
no job here has, so it is not kept.  (Scripts avoid it by dropping the model first, as those in ``bench/`` do.)

**Methods of dataclasses are compiled once**, like modules, and not in every process: a third of what the agent and the
commands take to start.  ``dataclasses`` writes the source of each method and runs it; here the same source is run from
code that was compiled before, as far as it was.  The test workers save what they compiled (``save_compiled``).

This imports nothing that is not loaded anyway.
"""

import gc
import marshal
import os
import sys

COMPILER = "torch._dynamo"
META = "torch._meta_registrations"
USE_META = ("torch._decomp", "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes")


class LateModule(type(sys)):
    """A module that is loaded when a name is asked for that is not in ``known``; ``top`` is the one in its place."""

    def __init__(self, name, top, **known):
        super().__init__(name)
        self.__dict__.update(known, _top=top)

    def __getattr__(self, name):
        # Asked for by the import system; __path__ once more by whoever imports a module below this one.
        if name.startswith("__") and not (name == "__path__" and self._top in sys.modules):
            raise AttributeError(name)
        return getattr(real(self.__name__, self._top), name)


def real(name, top):
    """The module itself; from now on it is the one that everybody finds."""
    if isinstance(sys.modules.get(top), LateModule):
        sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "late", None) != top]
        del sys.modules[top]
    import importlib

    return importlib.import_module(name)


class LateFinder:
    """Finds one module, and puts what ``make`` makes in its place."""

    def __init__(self, name, make):
        self.late, self._make = name, make

    def find_spec(self, name, path=None, target=None):
        # A torch that a test has made up has its own.
        if name != self.late or not os.path.isfile(os.path.join(path[0], "_dynamo", "eval_frame.py")):
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)

    def create_module(self, spec):
        return self._make()

    def exec_module(self, module):
        pass


class WhenLoaded:
    """Calls ``then`` with a module that has just been loaded."""

    def __init__(self, name, then):
        self._name, self._then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        # By others: the recorder may wait for the same module.
        found = (finder.find_spec(name, path, target) for finder in [*sys.meta_path])
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                self._then(module)

            spec.loader.exec_module = exec_module
        return spec


# -- torch ------------------------------------------------------------------------------------------------------------


def disable(fn=None, recursive=True, **_how):
    return fn if fn is not None else lambda fn: fn


def late_compiler():
    utils = LateModule(f"{COMPILER}.utils", COMPILER, get_optimize_ddp_mode=lambda: "ddp_optimizer")
    rules = LateModule(f"{COMPILER}.trace_rules", COMPILER, clear_lru_cache=lambda: None)
    known = {"disable": disable, "graph_break": lambda *_: None, "utils": utils, "trace_rules": rules}
    return LateModule(COMPILER, COMPILER, **known)


def late_meta():
    """What torch imports nearly last; and what the real one does that jobs need."""
    if "_duckdb" not in sys.modules:  # which complains if it is not collected
        gc.freeze()
    if hasattr(sys.modules["torch._C"], "_set_generator_metaclass"):
        from torch._opaque_base import OpaqueBaseMeta

        sys.modules["torch._C"]._set_generator_metaclass(OpaqueBaseMeta)
    return LateModule(META, META)


def keep_no_object(module):
    keep = getattr(module.torch._C, "_stash_obj_in_tls", None)
    if keep is not None:
        module.torch._C._stash_obj_in_tls = lambda key, what: key == "context" or keep(key, what)


# -- dataclasses ------------------------------------------------------------------------------------------------------

COMPILED = os.path.join(os.path.dirname(__file__), "__pycache__", f"dataclasses.{sys.implementation.cache_tag}")
"""A file of code by its source."""
compiled = {}
is_read = False
are_new = False


def run_source(source, *where):
    """As ``exec``."""
    global are_new
    code = read_compiled().get(source)
    if code is None:
        code = marshal.dumps(compile(source, "<string>", "exec"))
        compiled[source] = code
        are_new = True
    exec(marshal.loads(code), *where)


def read_compiled():
    global is_read
    if not is_read:
        is_read = True
        try:
            with open(COMPILED, "rb") as file:
                compiled.update(marshal.load(file))
        except (OSError, EOFError, ValueError, TypeError):
            pass  # it is not there yet
    return compiled


def save_compiled():
    """Keep what was compiled here for all later processes, if that can be written."""
    global are_new
    if not are_new:
        return
    are_new = False
    try:
        os.makedirs(os.path.dirname(COMPILED), exist_ok=True)
        with open(f"{COMPILED}.{os.getpid()}", "wb") as file:
            marshal.dump(compiled, file)
        os.replace(f"{COMPILED}.{os.getpid()}", COMPILED)
    except OSError:
        pass


def run_compiled(dataclasses):
    dataclasses.exec = run_source


# ---------------------------------------------------------------------------------------------------------------------

if "STEPSCOPE_WHOLE_TORCH" not in os.environ:
    sys.meta_path.insert(0, LateFinder(COMPILER, late_compiler))
    sys.meta_path.insert(0, LateFinder(META, late_meta))
    for name in USE_META:
        sys.meta_path.insert(0, WhenLoaded(name, lambda _: real(META, META)))
sys.meta_path.insert(0, WhenLoaded("torch.autograd.graph", keep_no_object))
if "dataclasses" in sys.modules:  # Stepscope's own sitecustomize ran first
    run_compiled(sys.modules["dataclasses"])
else:
    sys.meta_path.insert(0, WhenLoaded("dataclasses", run_compiled))
