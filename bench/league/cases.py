"""The matrix, as data: every kind of fault, on one, two and four ranks, at all times, now and then, once, growing.

The base step takes about 40 ms.  A fault that is there all the time takes 30 ms more, one that comes every tenth step
60, a single one 1 or 5 s, a growing one up to 40.  ``effect10`` is another matter: 6 ms on a step of 60, from step 40
on.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from league.truth import Case, Truth

__all__ = ["CASES"]

STEPS = 80
FROM = 40
ONCE = 40
BASE_60 = "3,20,30,5"
STRAGGLER = {
    "input": "input_straggler",
    "forward": "compute_straggler",
    "backward": "compute_straggler",
    "optimizer": "compute_straggler",
    "inside": "straggler",
    "early": "straggler",
    "between": "straggler",
    "h2d": "h2d_straggler",
}
"""What a rank is called that loses time there."""
BOUND = {
    "input": "input_bound",
    "forward": "compute_bound",
    "backward": "compute_bound",
    "optimizer": "optimizer_bound",
    "comm": "comm_hook_bound",
    "inside": "wait_heavy",
    "early": "wait_heavy",
    "between": "between_steps",
    "checkpoint": "between_steps",
    "eval": "between_steps",
}
"""What a job is called whose ranks all lose time there."""
NAMES = {
    "inside": ("inside", "other"),
    "early": ("inside", "early", "other"),
    "between": ("between", "between_steps", "other"),
}
"""What else the phase may be called."""


def _phases(phase: str) -> frozenset[str]:
    return frozenset(NAMES.get(phase, (phase,)))


def _fault(phase: str, ranks: str, ms: float, when: str, steps: int = STEPS) -> tuple[str, ...]:
    return ("--steps", str(steps), "--fault", f"{phase}:{ranks}:{ms:g}:{when}")


def _start(when: str) -> int | None:
    kind, _, number = when.partition("=")
    if kind == "every":
        return int(number) - 1
    return int(number.split("-")[0]) if number else None


def _own(phase: str) -> set[str]:
    """What a rank's loss may be called: work between steps is also named by its place."""
    return {STRAGGLER[phase], "between_steps"} if phase == "between" else {STRAGGLER[phase]}


def _at_rank(ranks: int, culprit: int, phase: str, when: str, ms: float) -> Case:
    """One rank of several is slow."""
    kind = when.partition("=")[0]
    kinds = {
        "always": _own(phase),
        "from": {*_own(phase), "change_point"},
        "drift": {*_own(phase), "drift"},
        "every": {"jitter"},
        "once": {"stall"},
    }[kind]
    truth = Truth(
        kinds=frozenset(kinds),
        ranks=(culprit,),
        phases=_phases(phase),
        start=_start(when),
        step=ONCE if kind == "once" else None,
        period=10 if kind == "every" else None,
        also_true=frozenset({"throughput_drop"} if kind in ("from", "drift") else ()),
    )
    name = f"uneven/{ranks}/{phase}-{when.replace('=', '-')}"
    return Case(id=name, ranks=ranks, args=_fault(phase, str(culprit), ms, when), truth=truth)


def _everywhere(ranks: int, phase: str, when: str, ms: float) -> Case:
    """All ranks (or the only one) are slow."""
    kind = when.partition("=")[0]
    bound = BOUND[phase]
    kinds = {
        "always": bound,
        "from": "change_point",
        "drift": "drift",
        "every": "jitter",
        "once": "stall",
        "span": "throughput_drop",
    }[kind]
    also = {
        "always": set(),
        "from": {bound, "throughput_drop"},
        "drift": {bound, "throughput_drop"},
        "every": {bound},
        "once": set(),
        "span": {bound},
    }[kind]
    truth = Truth(
        kinds=frozenset({kinds}),
        phases=_phases(phase),
        start=_start(when),
        step={"once": ONCE, "from": FROM}.get(kind),
        period=10 if kind == "every" else None,
        also_true=frozenset(also),
    )
    family = "place" if kind == "always" else "time"
    name = f"{family}/{ranks}/{phase}-{when.replace('=', '-')}"
    return Case(id=name, ranks=ranks, args=_fault(phase, "all", ms, when), truth=truth)


def _uneven() -> Iterator[Case]:
    for ranks, culprit in ((2, 1), (4, 2)):
        for phase in ("input", "forward", "backward", "optimizer", "inside", "between"):
            yield _at_rank(ranks, culprit, phase, "always", 30)
        for phase in ("input", "forward", "backward", "optimizer"):
            yield _at_rank(ranks, culprit, phase, f"from={FROM}", 30)
            yield _at_rank(ranks, culprit, phase, "every=10", 60)
        for phase in ("input", "forward", "backward"):
            yield _at_rank(ranks, culprit, phase, "drift", 40)
        yield _at_rank(ranks, culprit, "input", f"once={ONCE}", 1000)
        yield _at_rank(ranks, culprit, "forward", f"once={ONCE}", 5000)
        yield _at_rank(ranks, culprit, "backward", f"once={ONCE}", 1000)
        for phase in ("input", "forward", "backward"):
            rotating = Truth(kinds=frozenset({"rotating_straggler"}), phases=_phases(phase))
            args = _fault(phase, "rotating", 30, "always")
            yield Case(id=f"uneven/{ranks}/{phase}-rotating", ranks=ranks, args=args, truth=rotating)
        three_per_cent = Truth(kinds=frozenset({"compute_straggler"}), ranks=(culprit,), phases=_phases("forward"))
        args = _fault("forward", str(culprit), 1.3, "always", steps=200)
        yield Case(id=f"uneven/{ranks}/forward-3-per-cent", ranks=ranks, args=args, truth=three_per_cent)
        imbalance = Truth(kinds=frozenset({"imbalance"}), also_true=frozenset({"rotating_straggler"}))
        args = ("--steps", str(STEPS), "--lengths", "0.4")
        yield Case(id=f"uneven/{ranks}/lengths", ranks=ranks, args=args, truth=imbalance)


def _by_design() -> Iterator[Case]:
    """Two stages of two ranks each, the second with twice the work; and two hosts of two ranks each."""
    stages = ("--groups", "2", "--base", "2,8,12,4")
    by_design = Truth(kinds=frozenset({"imbalance"}))
    yield Case(id="uneven/4/stages", ranks=4, args=("--steps", str(STEPS), *stages), truth=by_design)
    for phase in ("forward", "backward"):
        truth = Truth(
            kinds=frozenset({"compute_straggler"}), ranks=(3,), phases=_phases(phase),
            also_true=frozenset({"imbalance"}),
        )  # fmt: skip
        args = (*_fault(phase, "3", 30, "always"), *stages)
        yield Case(id=f"uneven/4/stages-{phase}", ranks=4, args=args, truth=truth)
    for phase in ("input", "forward"):
        truth = Truth(kinds=frozenset({"node_straggler"}), ranks=(2, 3), phases=_phases(phase))
        args = _fault(phase, "2+3", 30, "always")
        yield Case(id=f"uneven/4/node-{phase}", ranks=4, args=args, truth=truth, two_hosts=True)


def _places() -> Iterator[Case]:
    for ranks in (1, 2, 4):
        for phase in ("input", "optimizer", "between", "inside"):
            yield _everywhere(ranks, phase, "always", 30)
        if ranks > 1:
            yield _everywhere(ranks, "comm", "always", 30)
    for ranks in (1, 2):
        for phase, who, culprits in (("checkpoint", "0", (0,)), ("eval", "all", None)):
            truth = Truth(kinds=frozenset({"between_steps", "jitter"}), ranks=culprits, phases=_phases(phase))
            args = _fault(phase, who, 300, "every=10")
            yield Case(id=f"place/{ranks}/{phase}-every-10", ranks=ranks, args=args, truth=truth)
    yield _everywhere(1, "early", "always", 30)
    also_true = frozenset({"cpu_saturated", "low_overlap"})
    exchange = Truth(kinds=frozenset({"comm_bound"}), phases=_phases("comm"), also_true=also_true)
    args = ("--steps", "60", "--gradient-mb", "48")
    yield Case(id="place/2/large-gradients", ranks=2, args=args, truth=exchange)


def _times() -> Iterator[Case]:
    for phase in ("input", "forward", "backward", "between"):
        yield _everywhere(1, phase, f"from={FROM}", 30)
        yield _everywhere(1, phase, "every=10", 60)
        yield _everywhere(1, phase, "drift", 40)
    yield _everywhere(1, "optimizer", f"from={FROM}", 30)
    yield _everywhere(1, "forward", f"once={ONCE}", 5000)
    for phase in ("input", "between"):
        yield _everywhere(1, phase, f"once={ONCE}", 1000)
    for ranks in (1, 2, 4):
        yield _everywhere(ranks, "forward", "span=30-50", 40)
    yield _everywhere(1, "input", "span=30-50", 40)
    for ranks in (2, 4):
        for phase in ("input", "forward", "comm"):
            yield _everywhere(ranks, phase, f"from={FROM}", 30)
        yield _everywhere(ranks, "forward", "every=10", 60)
        yield _everywhere(ranks, "backward", "drift", 40)
        yield _everywhere(ranks, "forward", f"once={ONCE}", 1000)


def _machine() -> Iterator[Case]:
    """Memory that grows and cores that are wanted elsewhere."""
    side = frozenset({"between_steps", "straggler"})  # touching the pages takes time, too
    leaks: tuple[tuple[int, str, tuple[int, ...] | None], ...] = (
        (1, "10:0", None),
        (2, "10:1", (1,)),
        (4, "3:all", None),
    )
    for ranks, leak, culprits in leaks:
        truth = Truth(kinds=frozenset({"memory_creep"}), ranks=culprits, also_true=side)
        yield Case(id=f"memory/{ranks}/host-leak", ranks=ranks, args=("--steps", "160", "--leak", leak), truth=truth)
    crowded = Truth(kinds=frozenset({"cpu_saturated"}), also_true=frozenset({"jitter"}))
    for ranks in (1, 2):
        yield Case(id=f"machine/{ranks}/neighbors", ranks=ranks, args=("--busy",), truth=crowded, burn=4)
    yield Case(id="machine/4/too-many-ranks", ranks=4, args=("--busy",), truth=crowded)


def _effects() -> Iterator[Case]:
    """A tenth of the step, on one rank, from step 40 on."""
    for ranks, culprit in ((2, 1), (4, 2)):
        for phase in ("input", "forward", "backward", "optimizer"):
            kinds = frozenset({STRAGGLER[phase], "change_point"})
            truth = Truth(kinds=kinds, ranks=(culprit,), phases=_phases(phase), start=FROM)
            args = (*_fault(phase, str(culprit), 6, f"from={FROM}"), "--base", BASE_60)
            yield Case(id=f"effect10/{ranks}/{phase}", ranks=ranks, args=args, truth=truth)


def _healthy() -> Iterator[Case]:
    nothing = "0,0,0,0"
    tiny = ("--net", "tiny", "--base", nothing, "--steps", "400")
    compiler = "inductor" if shutil.which("c++") or shutil.which("g++") else "aot_eager"
    quickstart = ("--net", "cnn", "--batch", "64", "--base", nothing, "--steps", "150")
    variants: dict[str, tuple[int, tuple[str, ...]]] = {
        "padded": (1, ()),
        "padded-2": (2, ()),
        "padded-4": (4, ()),
        "noisy": (2, ("--noise", "0.08")),
        "tiny": (1, tiny),
        "tiny-2": (2, tiny),
        "no-loader": (1, ("--no-loader", "--net", "cnn", "--base", nothing, "--steps", "200")),
        "quickstart": (1, quickstart),
        "quickstart-2": (2, quickstart),
        "compile": (1, ("--compile", compiler, *quickstart)),
        "accumulate": (1, ("--accumulate", "4", "--batch", "4")),
        "accumulate-2": (2, ("--accumulate", "4", "--batch", "4")),
        "uneven-last-batch": (1, ("--epoch", "1000", *quickstart)),
        "checkpoint-every-50": (1, ("--fault", "checkpoint:0:20:every=50", "--steps", "160")),
        "evaluation-every-50": (2, ("--fault", "eval:all:40:every=50", "--steps", "160")),
        "autocast": (1, ("--autocast", "--net", "tiny")),
        "workers": (1, ("--workers", "2")),
        "cache-fills": (1, ("--cache-mb", "6", "--steps", "160")),
        # All ranks alike and slower in the model: that is how long the model takes.
        "long-forward": (1, ("--fault", "forward:all:30")),
        "long-forward-2": (2, ("--fault", "forward:all:30")),
        "long-backward-4": (4, ("--fault", "backward:all:30")),
    }
    truth = Truth(also_true=frozenset({"compute_bound", "healthy"}))
    for name, (ranks, args) in variants.items():
        yield Case(id=f"healthy/{ranks}/{name}", ranks=ranks, args=args, truth=truth)


def _cuda() -> Iterator[Case]:
    """On one GPU; two ranks share it, so their own work is short."""
    short = ("--base", "1,3,4,1")
    cases: tuple[tuple[str, int, tuple[str, ...], Truth], ...] = (
        ("h2d", 1, ("--fault", "h2d:all:400"), Truth(kinds=frozenset({"h2d_bound"}), phases=_phases("h2d"))),
        (
            "h2d-straggler", 2, ("--fault", "h2d:1:400", *short),
            Truth(
                kinds=frozenset({"h2d_straggler"}), ranks=(1,), phases=_phases("h2d"),
                also_true=frozenset({"low_gpu_utilization"}),
            ),
        ),
        ("device-leak", 1, ("--device-leak-mb", "64", "--steps", "160"), Truth(kinds=frozenset({"memory_creep"}))),
        ("fragments", 1, ("--fragment",), Truth(kinds=frozenset({"fragmentation"}))),
        (
            "uneven-memory", 2, ("--device-hold", "20000:1", *short),
            Truth(kinds=frozenset({"memory_imbalance"}), ranks=(1,)),
        ),
        (
            "idle-gpu", 1, ("--fault", "input:all:60", "--steps", "120"),
            Truth(kinds=frozenset({"low_gpu_utilization"}), also_true=frozenset({"input_bound"})),
        ),
        ("input", 1, ("--fault", "input:all:80"), Truth(
            kinds=frozenset({"input_bound"}), phases=_phases("input"), also_true=frozenset({"low_gpu_utilization"})
        )),
        ("healthy", 1, (), Truth(also_true=frozenset({"compute_bound", "healthy"}))),
    )  # fmt: skip
    for name, ranks, args, truth in cases:
        yield Case(id=f"cuda/{ranks}/{name}", ranks=ranks, args=args, truth=truth, device="cuda")


CASES: tuple[Case, ...] = (
    *_places(), *_uneven(), *_by_design(), *_times(), *_machine(), *_effects(), *_healthy(), *_cuda()
)  # fmt: skip
