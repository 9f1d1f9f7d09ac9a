"""The same league without a process: recordings made up by ``fakes.cluster``, many seeds per cell.

Nothing is measured here; what is tested is whether verdicts hold over noise that one real run per cell cannot show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fakes.cluster import Cluster, Fault, slow_at
from fakes.load_noise import host_figures
from fakes.samples import with_samples

from league.replay import detected_after, verdict
from league.truth import Claim, Truth
from stepscope.records.series import RunData

__all__ = ["CELLS", "Cell", "play"]

STEPS = 100
FROM = 60
PHASES = ("input", "forward", "backward", "optimizer")
COMPUTE = ("forward", "backward", "optimizer")
CONDITIONS = ((0.02, 0.0), (0.05, 0.0), (0.02, 0.005))
"""Spread of a phase's time, and how often one takes several times as long."""
PHASES_60 = {"input": 3.0, "forward": 18.0, "backward": 30.0, "optimizer": 7.0, "other": 1.0}


@dataclass(frozen=True, kw_only=True)
class Cell:
    id: str
    cluster: Cluster
    truth: Truth = field(default_factory=Truth)

    def run(self, seed: int, load: str = "none") -> RunData:
        """Seeds take turns in how even the machine is; a healthy cell says that by itself."""
        noise, tail = CONDITIONS[0 if self.truth.healthy else seed % len(CONDITIONS)]
        noise, tail = max(noise, self.cluster.noise), max(tail, self.cluster.tail)
        cluster = replace(self.cluster, seed=seed, noise=noise, tail=tail, load=load)
        if load == "none":
            return cluster.run()
        figures = host_figures(load, ranks=cluster.ranks // cluster.hosts, cores=cluster.cores)
        return with_samples(cluster, host=figures, process={"cpu_wait": cluster.cpu_wait})


def play(cell: Cell, seed: int, load: str = "none") -> tuple[list[Claim], int | None]:
    """What is said of the cell's run with this seed beside this load, and after how many steps with the fault."""
    run = cell.run(seed, load)
    return verdict(run), detected_after(run, cell.truth, cell.cluster.ranks)


def _kind(phase: str) -> str:
    return "input_straggler" if phase == "input" else "compute_straggler"


def _cell(name: str, ranks: int, faults: Sequence[Fault], truth: Truth, cluster: Cluster | None = None) -> Cell:
    made = replace(cluster or Cluster(steps=STEPS), ranks=ranks, faults=tuple(faults), warmup_ms=50.0)
    return Cell(id=name, cluster=made, truth=truth)


def _on_rank(phase: str, when: str, *, kinds: set[str], rank: int, start: int | None = None) -> Truth:
    period = 10 if when == "every" else None
    step = FROM if when == "once" else None
    phases = frozenset({phase})
    return Truth(kinds=frozenset(kinds), ranks=(rank,), phases=phases, start=start, step=step, period=period)


def _uneven() -> Iterator[Cell]:
    for ranks, rank in ((2, 1), (4, 2), (16, 11)):
        for phase in PHASES:
            own = _kind(phase)
            yield _cell(
                f"uneven/{ranks}/{phase}-always", ranks, [slow_at(rank, phase, 20)],
                _on_rank(phase, "always", kinds={own}, rank=rank),
            )  # fmt: skip
            yield _cell(
                f"uneven/{ranks}/{phase}-every-10", ranks, [slow_at(rank, phase, 60, range(9, STEPS, 10))],
                _on_rank(phase, "every", kinds={"jitter"}, rank=rank),
            )  # fmt: skip
            yield _cell(
                f"uneven/{ranks}/{phase}-once", ranks, [slow_at(rank, phase, 1000, range(FROM, FROM + 1))],
                _on_rank(phase, "once", kinds={"stall"}, rank=rank),
            )  # fmt: skip
            yield _cell(
                f"uneven/{ranks}/{phase}-drift", ranks, [slow_at(rank, phase, 40, ramp=True)],
                _on_rank(phase, "drift", kinds={own, "drift"}, rank=rank),
            )  # fmt: skip
            yield _cell(
                f"effect10/{ranks}/{phase}", ranks, [slow_at(rank, phase, 6, range(FROM, STEPS))],
                _on_rank(phase, "from", kinds={own, "change_point"}, rank=rank, start=FROM),
                Cluster(steps=STEPS, phases_ms=PHASES_60),
            )  # fmt: skip
            rotating = [slow_at(each, phase, 30, range(each, STEPS, ranks)) for each in range(ranks)]
            truth = Truth(kinds=frozenset({"rotating_straggler"}), phases=frozenset({phase}))
            yield _cell(f"uneven/{ranks}/{phase}-rotating", ranks, rotating, truth)


def _alike() -> Iterator[Cell]:
    """All ranks hit alike."""
    bound = {"input": "input_bound", "optimizer": "optimizer_bound", "inside": "wait_heavy", "other": "between_steps"}
    for ranks in (1, 2, 8):
        for phase, kind in bound.items():
            faults = [slow_at(rank, phase, 20) for rank in range(ranks)]
            names = {phase, "between"} if phase == "other" else {phase, "other"} if phase == "inside" else {phase}
            yield _cell(
                f"place/{ranks}/{phase}", ranks, faults, Truth(kinds=frozenset({kind}), phases=frozenset(names))
            )
        for phase in ("input", "forward", "backward"):
            also = frozenset({bound.get(phase, "compute_bound"), "throughput_drop"})
            times = {
                "change_point": (range(FROM, STEPS), 30.0, False),
                "drift": (None, 40.0, True),
                "jitter": (range(9, STEPS, 10), 60.0, False),
                "stall": (range(FROM, FROM + 1), 1000.0, False),
                "throughput_drop": (range(30, 50), 40.0, False),
            }
            for kind, (steps, ms, ramp) in times.items():
                faults = [slow_at(rank, phase, ms, steps, ramp=ramp) for rank in range(ranks)]
                truth = Truth(
                    kinds=frozenset({kind}),
                    phases=frozenset({phase}),
                    step=FROM if kind in ("change_point", "stall") else None,
                    start=FROM if kind in ("change_point", "stall") else None,
                    period=10 if kind == "jitter" else None,
                    also_true=also,
                )
                yield _cell(f"time/{ranks}/{phase}-{kind}", ranks, faults, truth)
    for ranks in (2, 8):
        slow_network = Cluster(steps=STEPS, comm_ms=25.0)
        truth = Truth(kinds=frozenset({"comm_bound"}), phases=frozenset({"comm"}))
        yield _cell(f"place/{ranks}/comm", ranks, [], truth, slow_network)


def _healthy() -> Iterator[Cell]:
    tiny = {"input": 0.2, "forward": 0.3, "backward": 0.4, "optimizer": 0.1, "other": 0.05}
    variants = {
        "even": Cluster(steps=STEPS),
        "noisy": Cluster(steps=STEPS, noise=0.08),
        "wandering": Cluster(steps=STEPS, drift=0.03),
        "tails": Cluster(steps=STEPS, tail=0.01),
        "epochs": Cluster(steps=STEPS, epoch_every=25, epoch_input_ms=30.0),
        "compiles": Cluster(steps=STEPS, compile_steps=(0, 3)),
        "unmeasured": Cluster(steps=STEPS, comm_measured=False),
        "tiny": Cluster(steps=400, phases_ms=tiny, comm_ms=0.1),
        "short": Cluster(steps=15),
    }
    truth = Truth(also_true=frozenset({"compute_bound", "healthy"}))
    for ranks in (1, 2, 8):
        for name, cluster in variants.items():
            yield _cell(f"healthy/{ranks}/{name}", ranks, [], truth, cluster)


CELLS: tuple[Cell, ...] = (*_alike(), *_uneven(), *_healthy())
