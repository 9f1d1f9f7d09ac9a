"""What a forked child inherits of ours, and must neither use nor destroy.

A forked child has a copy of every object of its parent, but not what stands behind some of them: CUDA's context, a
thread, a server.  Destroying such a copy may call into what is not there; destroying one CUDA event in a child of a
process that uses CUDA aborts the child.  The rule, therefore: **an object of ours that holds a device object, a lock, a
socket or a thread is made immortal when it is made.**  Its destructor never runs, in no process, not even when an
interpreter shuts down; what it holds goes with the process.  A child just loses sight of it (``Recorder.forget``).

This is stronger than to tell the child by ``os.register_at_fork`` what to leave alone: it also holds for children that
are forked by native code, for those that end by ``sys.exit`` and clear their modules, and in the moment before the
child was told.
"""

from __future__ import annotations

import ctypes
from typing import TypeVar

__all__ = ["immortal"]

T = TypeVar("T")


def immortal(thing: T) -> T:
    """The same object, with one reference that nobody ever gives back."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing
