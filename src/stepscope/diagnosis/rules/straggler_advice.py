"""What to do about a rank that is late, by phase: for ``stragglers`` and for stages and groups in ``imbalance``."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.judge.advice import advice_for, say
from stepscope.records.steps import GRAPH_PHASE
from stepscope.records.text import named_ranks

__all__ = ["EXPERT_ADVICE", "NODE_ADVICE", "SHARED_CORE_ADVICE", "straggler_advice"]

COMPUTING = ("forward", "backward", GRAPH_PHASE)
LAUNCHED = (*COMPUTING, "optimizer")
UNNAMED = ("other", "eval", "checkpoint")
LESS_OFTEN = "Do it less often, after the last step, or in a background thread."

NODE_ADVICE = (
    "It is host {host}, not a rank: compare its clocks, temperature, power limit and load with the rest.",
    "If you find no cause, exclude the host from the next allocation. The cost above is what it costs to keep it.",
)
WHERE_TO_LOOK = (
    say("Look at {place}: {who}{where} {was} sampled there, outside all phases.", place=True, phase=("other", None)),
    say("Look at {place}: {who}{where} {was} sampled there in {phase}.", place=True),
    say(
        "Look at what {who}{where} read{s}: larger or remote files, fewer DataLoader workers, a busy disk.",
        phase="input",
    ),
    say("Check how batches of {who}{where} get to the device: pinned memory, NUMA binding, PCIe width.", phase="h2d"),
    say(
        "{Who}{where} {launch} {its} kernels late: look at the Python code that only {it_runs} there.",
        phase=LAUNCHED,
        side="host",
    ),
    say(
        "The kernels of {who}{where} take longer, but the host launches on time: compare batch shape, sequence length "
        "and branches with the others.",
        phase=LAUNCHED,
        side="device",
    ),
    say(
        "Check that {who}{where} compute{s} the same as the others: batch shape, sequence length, branches.",
        phase=COMPUTING,
    ),
    say(
        "See what {who}{where} {does} in optimizer.step() that others do not: hooks, clipping, a logged norm.",
        phase="optimizer",
    ),
    say("Look for work that only {who}{where} {does}: logging, metrics, saving, printing.", phase=UNNAMED),
    say("{Who}{where} {lose} time in several phases: suspect the machine.", phase=None),
    say("Compare what the phase {phase!r} does on {who}{where} with the other ranks."),
)
WHAT_TO_DO = (
    say(
        "Rank 0 is the usual place for logging and saving: do it less often or in a background thread.",
        only_rank_0=True,
        phase=(*UNNAMED, None),
    ),
    say(
        "Ranks hold parts of one sequence: with a causal mask the later parts have more work. Assign them in pairs, "
        "early with late (torch's context_parallel does, unless load balancing is off).",
        splits_sequences=True,
        phase=COMPUTING,
        side=(None, "device"),
    ),
    say(
        "Ranks that hold parts of one model need the same samples: let one of them read and broadcast the batch.",
        phase="input",
        share_samples=True,
    ),
    say(
        "Give every rank the same number of samples (DistributedSampler) and shuffle large items across ranks.",
        phase="input",
    ),
    say("Copy with non_blocking=True from a DataLoader with pin_memory=True.", phase="h2d"),
    say(
        "If the code is the same, the CPU is not: other processes on its cores, fewer of them, lower clocks.",
        phase=LAUNCHED,
        side="host",
    ),
    say(
        "If the work is equal, the device is not: clocks, power limit, throttling, another process on it.",
        phase=LAUNCHED,
        side="device",
    ),
    say(
        "If all ranks do the same work, check the machine: other processes on {its} cores or device, clocks, "
        "throttling.",
        phase=COMPUTING,
    ),
    say("If parameters are sharded by hand, balance the shards.", phase="optimizer"),
    say(LESS_OFTEN, place=True),
    say(LESS_OFTEN, phase=UNNAMED),
    say("Look for other processes on {its} cores or device, lower clocks, fewer CPU threads.", phase=None),
    say("Give every rank the same share of it, or take it out of the step."),
)
EXPERT_ADVICE = (
    say(
        "Balance the router: a load-balancing loss or a bias per expert; a capacity factor bounds what one expert "
        "gets.",
        "If the same experts are always the busiest, place them on different ranks or give each a copy.",
        same_batches=True,
    ),
    say(
        "If the router sends its experts more tokens: a load-balancing loss, a bias per expert or a capacity factor.",
        "If its batches are longer than those of the others: bucket samples by length, or batch by tokens.",
    ),
)
"""``same_batches``: the ranks are known to have equally many tokens before the router distributes them."""
OWN_CORES = "give each rank its own cores (taskset, cgroups, --exclusive)"
SHARED_CORE_ADVICE = (
    say(f"Stop or move {{busy}}; or {OWN_CORES}.", busy=True),
    say(f"Find what else runs on the core of rank {{rank}} (top, with its column P), or {OWN_CORES}."),
)


def straggler_advice(
    ranks: Sequence[int],
    hosts: Sequence[str],
    phase: str | None,
    *,
    world_size: int,
    place: str = "",
    side: str | None = None,
    share_samples: bool = False,
    splits_sequences: bool = False,
) -> tuple[str, ...]:
    """``place``: a line of code that the ranks' stacks show.

    ``side``: ``host`` if it is known to launch late, ``device`` if its kernels are known to take longer.
    ``share_samples``: some ranks read the same samples, because they hold parts of one model; ``splits_sequences``: or
    parts of one sequence.
    """
    several = len(ranks) > 1
    facts = {
        "phase": phase,
        "place": place,
        "side": side,
        "share_samples": share_samples,
        "splits_sequences": splits_sequences,
        "only_rank_0": tuple(ranks) == (0,) and world_size > 1,
        "Who": named_ranks(ranks),
        "who": named_ranks(ranks).lower(),
        "where": f" (host {hosts[0]})" if len(set(hosts)) == 1 and hosts[0] else "",
        "s": "" if several else "s",
        "does": "do" if several else "does",
        "was": "were" if several else "was",
        "its": "their" if several else "its",
        "it_runs": "they run" if several else "it runs",
        "launch": "launch" if several else "launches",
        "lose": "lose" if several else "loses",
    }
    return *advice_for(WHERE_TO_LOOK, **facts), *advice_for(WHAT_TO_DO, **facts)
