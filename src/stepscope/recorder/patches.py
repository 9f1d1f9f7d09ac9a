"""Attributes replaced on other people's objects, and how they were before.

The last patch is undone first; undoing a patch that somebody else has patched over leaves theirs in place.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Patches"]

_ABSENT = object()


class Patches:
    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """``setattr(owner, name, value)``, remembering whether ``owner`` itself had the name before."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._done.append((owner, name, before, value))

    def undo(self, owner: Any = None) -> None:
        """Undo all patches, or those on one owner."""
        keep = []
        for patch in reversed(self._done):
            target, name, before, value = patch
            if owner is not None and target is not owner:
                keep.append(patch)
            elif vars(target).get(name) is value:
                if before is _ABSENT:
                    delattr(target, name)
                else:
                    setattr(target, name, before)
        self._done = keep[::-1]
