"""When does a step end?  When the optimizer that closes the loop's cycle returns.

With one optimizer that is every ``step()``.  With several, a training iteration steps them in turn (GAN: D, G; or D
five times, then G; or one for the embeddings and one for the rest), and the iteration ends with the one that comes
last in the cycle: the optimizer seen latest closes.  If the closer is not stepped for ``PATIENCE`` steps of the others
(the script moved on to another stage), the one that steps now closes from then on.
"""

from __future__ import annotations

__all__ = ["StepBoundaries"]


class StepBoundaries:
    PATIENCE = 16

    def __init__(self) -> None:
        self.sole = 0
        """The id of the only optimizer seen so far, for a caller in a hurry; 0 when there are several (or none)."""
        self._known: set[int] = set()
        self._closer = 0
        self._since_closer = 0

    def hold(self) -> None:
        """Until ``release``, callers in a hurry are not served: they have to ask."""
        self.sole = 0

    def release(self) -> None:
        (self.sole,) = self._known if len(self._known) == 1 else (0,)

    def closes(self, optimizer: int) -> bool:
        """Does the step of this optimizer (by id) that just returned end a training step?"""
        if optimizer == self._closer:
            self._since_closer = 0
            return True
        if optimizer not in self._known:
            self._known.add(optimizer)
            self.release()
            self._closer = optimizer
            self._since_closer = 0
            return True
        self._since_closer += 1
        if self._since_closer < self.PATIENCE:
            return False
        self._closer = optimizer
        self._since_closer = 0
        return True
