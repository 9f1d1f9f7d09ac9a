"""How far a framework says that its training is, as facts: numbers of steps in its logs, epochs, evaluations.

Steps are numbered from 0 in each process; a framework's numbers continue after a resume, and some begin with 1.  While
a training runs, both grow by one per step, so a pair of them stands for all steps until the next pair that differs.
Pairs are compared at the beginning and the end of epochs.  If a framework counts in other strides (batches, while a
step here takes several of them), its numbers are left out until its next training begins.

Only rank 0 writes them: a hub keeps every version of a rank's facts.  For the same reason a run of many epochs writes
ever more rarely, and leaves out the epochs meanwhile, which would be wrong; the end of the process writes everything.

An evaluation is timed as a whole, with its input, its metrics and its callbacks; the phase ``eval`` has the calls of
models alone.  Phases are left as they are.

*What may be called* of the script's objects: what the framework itself reads in each epoch, its counters.
*How long it may take*: some microseconds in each epoch and each evaluation, plus writing the facts (30 µs).
*What may be kept alive*: nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.ledger import NOBODY
from stepscope.recorder.recorder import Recorder

__all__ = ["Progress"]

MOST_PAIRS = 8
"""The last ones: a process that trains more often than that is a sweep."""
MOST_EPOCHS = 12
"""The last ones: facts have two kilobytes."""
MOST_EVALUATIONS = 6
LONGEST_NAME = 40
ALL_WRITTEN = 128
"""So many changes are written at once; later ones when their number has grown by …"""
GROWTH = 8
"""… an eighth."""


class Progress:
    """What the frameworks of this process reported."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._forget()
        recorder.when_forked(self._forget)
        recorder.when_ending(self._end)

    def _forget(self) -> None:
        self.by = ""
        """The framework that counts."""
        self._pairs: list[list[int]] = []
        """From this Stepscope step on, the numbers in the framework's logs continue from this one."""
        self._epochs: list[list[int]] = []
        """From this Stepscope step on, this epoch."""
        self._begins = True
        """Whether a training begins: its numbers need not continue those of an earlier one."""
        self._uneven = False
        """Whether the framework counts in other strides."""
        self._evaluations: dict[str, list[int]] = {}
        """By name: how often, how long in all (ns), and how many steps had ended before the last."""
        self._changes = self._write_at = 0
        """Changes so far, and the next one that is written."""
        self._inside: list[bool] = []
        """For each evaluation in progress, whether another one was part of it."""

    @property
    def step(self) -> int:
        """The Stepscope step that ends next."""
        return self._recorder.step

    @property
    def forward_seen(self) -> bool:
        """Whether a model was trained since the last step ended."""
        return self._recorder.forward_seen

    # -- Numbers and epochs ---------------------------------------------------------------------------------------

    def training_begins(self, by: str) -> None:
        self.by, self._begins, self._uneven = by, True, False

    def counts(self, by: str, number: int, step: int | None = None) -> None:
        """The step that ends next, or ``step``, has this number in the framework's logs."""
        step, pairs = self.step if step is None else step, self._pairs
        begins, self._begins, self.by = self._begins, False, by
        if self._uneven or type(number) is not int or number < 0:
            return
        before = [list(pair) for pair in pairs]
        if begins or not pairs:
            if pairs and pairs[-1][0] == step:
                pairs.pop()
            if not pairs or number != _continued(pairs[-1], step):
                pairs.append([step, number])
        else:
            ahead = number - _continued(pairs[-1], step)
            if ahead == -1:
                pairs[-1][0] += 1  # the first call of a second optimizer was a step here
            elif ahead == 1:
                pairs.append([step, number])
            elif ahead:
                self._uneven = True
                pairs.clear()
        del pairs[:-MOST_PAIRS]
        if pairs != before:
            self._write()

    def epoch_begins(self, epoch: int) -> None:
        if type(epoch) is not int or epoch < 0 or (self._epochs and self._epochs[-1][1] == epoch):
            return
        if self._epochs and self._epochs[-1][0] == self.step:
            self._epochs.pop()
        self._epochs.append([self.step, epoch])
        del self._epochs[:-MOST_EPOCHS]
        self._write()

    # -- Hooks ----------------------------------------------------------------------------------------------------

    def before(
        self, original: Callable[..., Any], see: Callable[[Progress, tuple[Any, ...], dict[str, Any]], None]
    ) -> Callable[..., Any]:
        """Wrap a method so that ``see`` is called with its arguments first, on the training thread."""
        see_safely = failsafe(see)

        @functools.wraps(original)
        def seen(*args: Any, **kwargs: Any) -> Any:
            if self._is_training_thread():
                see_safely(self, args, kwargs)
            return original(*args, **kwargs)

        return seen

    def evaluation(
        self, original: Callable[..., Any], name_of: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    ) -> Callable[..., Any]:
        """Wrap a method that evaluates; ``name_of`` returns the evaluation's name from its arguments."""
        name_safely = failsafe(name_of)

        @functools.wraps(original)
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            if not self._is_training_thread():
                return original(*args, **kwargs)
            name, began_ns = name_safely(args, kwargs), self._recorder.ledger.now()
            self._inside.append(False)
            try:
                return original(*args, **kwargs)
            finally:
                self._evaluated(name, began_ns)

        return evaluated

    @failsafe
    def _evaluated(self, name: Any, began_ns: int) -> None:
        several = self._inside.pop() if self._inside else False
        if several or type(name) is not str or not name:
            return  # one evaluation for each of several datasets: each has been counted
        self._inside[:] = [True] * len(self._inside)
        known = self._evaluations.get(name[:LONGEST_NAME])
        if known is None:
            if len(self._evaluations) >= MOST_EVALUATIONS:
                return
            known = self._evaluations[name[:LONGEST_NAME]] = [0, 0, 0]
        known[0] += 1
        known[1] += self._recorder.ledger.now() - began_ns
        known[2] = self.step
        self._write()

    def _is_training_thread(self) -> bool:
        return self._recorder.ledger.thread in (NOBODY, get_ident())

    # -- Facts ----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Something changed."""
        self._changes += 1
        if self._changes > ALL_WRITTEN and self._changes < self._write_at:
            return
        self._write_at = self._changes + self._changes // GROWTH
        self._set_facts(with_epochs=self._changes <= ALL_WRITTEN)

    @failsafe
    def _end(self) -> None:
        if self._changes > ALL_WRITTEN:
            self._set_facts(with_epochs=True)

    def _set_facts(self, *, with_epochs: bool) -> None:
        recorder = self._recorder
        if recorder.identity.rank > 0:
            return
        found: dict[str, Any] = {}
        if self._pairs or self._epochs:
            found["progress"] = {
                "by": self.by,
                "numbers": [list(pair) for pair in self._pairs],
                "epochs": [list(pair) for pair in self._epochs] if with_epochs else [],
            }
        if self._evaluations:
            found["evaluations"] = [
                {"name": name, "count": count, "ms": round(took_ns / 1e6, 1), "after": after}
                for name, (count, took_ns, after) in self._evaluations.items()
            ]
        recorder.objects.facts = {**recorder.objects.facts, **found}
        if recorder.ring is not None:
            recorder.ring.set_facts(recorder.objects.facts)


def _continued(pair: list[int], step: int) -> int:
    return pair[1] + step - pair[0]
