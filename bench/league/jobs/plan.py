"""Which rank loses how much time in which phase of which step: the truth that a verdict is held against.

A fault is written PHASE:RANKS:MS[:WHEN].  Phases are input, early (between input and forward), h2d (MS are then MB of
pageable memory), forward, backward, comm (the all-reduce itself), inside (between backward and the optimizer),
optimizer, between (after the optimizer), checkpoint and eval.  Ranks: ``2``, ``2+3``, ``all`` or ``rotating`` (another
one at each step).  When: ``always``, ``from=N``, ``span=N-M`` (M not included), ``every=K``, ``once=N`` or ``drift``
(grows from nothing to MS over the run).
"""

import random

PHASES = ("input", "early", "h2d", "forward", "backward", "comm", "inside", "optimizer")
PHASES += ("between", "checkpoint", "eval")


class Fault:
    def __init__(self, text):
        self.phase, self.ranks, amount, self.when = (*text.split(":"), "always")[:4]
        self.ms = float(amount)
        self.kind, _, numbers = self.when.partition("=")
        self.numbers = [int(number) for number in numbers.split("-") if number]
        if self.phase not in PHASES or self.kind not in ("always", "from", "span", "every", "once", "drift"):
            raise ValueError(f"{text!r} is not PHASE:RANKS:MS[:WHEN]")

    def hits(self, rank, ranks, step):
        """Whether this rank is hit in this step."""
        if self.ranks == "rotating":
            there = step % ranks == rank
        else:
            there = self.ranks == "all" or str(rank) in self.ranks.split("+")
        return there and self._now(step)

    def _now(self, step):
        if self.kind == "every":
            return step % self.numbers[0] == self.numbers[0] - 1
        if self.kind == "once":
            return step == self.numbers[0]
        if self.kind == "from":
            return step >= self.numbers[0]
        return self.kind != "span" or self.numbers[0] <= step < self.numbers[1]

    def ms_at(self, step, steps):
        return self.ms * (step / steps if self.kind == "drift" else 1.0)


class Plan:
    """How long each phase of each step of one rank takes: a base with a little noise, and the faults."""

    def __init__(self, base_ms, faults, *, rank, ranks, steps, noise=0.025, lengths=0.0, scale=1.0):
        self.base_ms, self.faults = base_ms, faults
        self.rank, self.ranks, self.steps = rank, ranks, steps
        self.noise, self.lengths, self.scale = noise, lengths, scale

    def fault_s(self, phase, step):
        """What the faults add, in seconds (for h2d: in MB by 1,000)."""
        hits = (fault for fault in self.faults if fault.phase == phase and fault.hits(self.rank, self.ranks, step))
        return sum(fault.ms_at(step, self.steps) for fault in hits) / 1000

    def seconds(self, phase, step):
        base = self.base_ms.get(phase, 0.0) / 1000
        if base:
            base *= self._chance("noise", phase, step).lognormvariate(0.0, self.noise)
        if phase in ("forward", "backward"):
            base *= self.scale
            if self.lengths:  # the same sequence in both phases
                base *= self._chance("length", "", step).lognormvariate(0.0, self.lengths)
        return base + self.fault_s(phase, step)

    def _chance(self, what, phase, step):
        """Its own for every draw, so that no draw depends on how many came before it."""
        return random.Random(f"{what}/{phase}/{self.rank}/{step}")
