"""Judge a hang: which kind it is and which rank is to blame, with one function per kind; or why it is not a hang.

    answer = judge(evidence, number=1, declared_wall_ns=now, stopped_wall_ns=then)
    if isinstance(answer, NotAHang): look again in answer.look_again_s

Pure: the same evidence gives the same answer, and no evidence makes it raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepscope.flight.stacks import group_stacks, lost_peer, user_frame
from stepscope.flight.verdict import Side, Verdict
from stepscope.flight.wording import (
    collective_text,
    group_text,
    listed,
    more_than_text,
    one_line,
    place_text,
    ranks_text,
)
from stepscope.hangs import activity
from stepscope.hangs.activity import (
    Activity,
    Doing,
    Ruling,
    Situation,
    circles,
    cycle_text,
    is_p2p,
    situation_of,
    waits_of,
)
from stepscope.hangs.evidence import RAISED, Evidence, LostHost, RankEvidence, WorkerEvidence, read_recorders
from stepscope.hangs.excuses import NotAHang, at_rest, excuse_of, under_way, unfinished
from stepscope.records.collectives import group_name
from stepscope.records.dataclass_json import encoded
from stepscope.records.hang import Culprit, Frame, HangKind, HangRecord, RankThere, StackGroup, WaitingIn
from stepscope.records.text import duration_text

__all__ = ["NotAHang", "judge"]


# -- reasons ----------------------------------------------------------------------------------------------------------
# Why a rank is to blame, in words: what it does, at which line, and for input which worker process it waits for.

WORKER_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "died",
    "X": "died",
    "D": "waits for a disk",
}
LONG = {
    "compile": "compiling",
    "checkpoint": "writing a checkpoint",
    "evaluation": "evaluating",
    "computing": "at work",
}
"""Activities that are not a hang until they last long."""


def account(situation: Situation, rank: int) -> tuple[str, Frame | None]:
    """``sleeps at train.py:41 (time.sleep(999))`` and the most important line."""
    doing, evidence = situation.doings[rank], situation.ranks[rank]
    lines = situation.evidence.source_lines
    if doing.state == "gone":
        step = f" in step {evidence.step}" if evidence.step is not None else ""
        return f"{doing.words}{step}", doing.at
    words = doing.words
    if doing.state == "collective":
        words = f"waits in {collective_text(doing.waiting_in)}"
    elif doing.state in LONG:
        words = f"has been {LONG[doing.state]} for {more_than_text(evidence.silent_s)}"
    place = place_text(doing.at, lines) or _elsewhere(evidence)
    text = f"{words} at {place}" if place else words
    if doing.state != "input":
        return text, doing.at
    worker = blamed_worker(evidence)
    if worker is not None:
        frame = user_frame(worker.threads)
        at = place_text(frame, lines)
        return f"{text}; {worker_words(worker, lines)}{f' at {at}' if at else ''}", frame or doing.at
    if _waits_for_workers(evidence) and not any(one.kind == "dataloader" for one in evidence.workers):
        return f"{text}; its DataLoader workers are gone", doing.at
    return text, doing.at


def worker_words(worker: WorkerEvidence, lines: dict[tuple[str, int], str]) -> str:
    """``its DataLoader worker 4711 is stopped (SIGSTOP)``."""
    frame = user_frame(worker.threads)
    source = lines.get((frame.file, frame.line), "") if frame is not None else ""
    does = WORKER_STATES.get(worker.process_state) or activity.wait_words(activity.main_frames(worker.threads), source)
    return f"its DataLoader worker {worker.pid} {does}"


def blamed_worker(rank: RankEvidence) -> WorkerEvidence | None:
    """The worker that input waits for: one that cannot run, else one that is in user code."""
    workers = [worker for worker in rank.workers if worker.kind == "dataloader"]
    for states in (("T", "t"), ("Z", "X"), ("D",)):
        found = next((worker for worker in workers if worker.process_state in states), None)
        if found is not None:
            return found
    return next((worker for worker in workers if user_frame(worker.threads) is not None), None)


def culprits_of(situation: Situation, ranks: Sequence[int], *, before: str = "") -> tuple[Culprit, ...]:
    """The culprits with reasons. ``before``: text that precedes each reason (``has not called all_reduce; it``)."""
    found = []
    for rank in sorted(ranks):
        text, at = account(situation, rank)
        found.append(Culprit(rank=rank, reason=f"{before} {text}".strip(), at=at))
    return tuple(found)


def _waits_for_workers(rank: RankEvidence) -> bool:
    return any(frame.function in ("_try_get_data", "_get_data") for frame in activity.main_frames(rank.threads))


def _elsewhere(rank: RankEvidence) -> str:
    """The innermost frame, if there is no user frame."""
    frames = activity.main_frames(rank.threads)
    return f"{place_text(frames[0], {})}, in {frames[0].function}" if frames and frames[0].line else ""


def alike(doings: Sequence[Doing]) -> bool:
    """Whether all of these do the same at the same line, so that one sentence covers them."""
    return len({(doing.state, doing.words, doing.at) for doing in doings}) == 1


def unanswered(situation: Situation) -> tuple[str, ...]:
    mute = [rank for rank, evidence in situation.ranks.items() if not evidence.threads and evidence.alive]
    return (f"No stack trace is available for {ranks_text(mute)}.",) if mute else ()


# -- ranks on other hosts ---------------------------------------------------------------------------------------------
# Ranks that wait for ranks without evidence here: on lost hosts, or on hosts that did not report.

HOSTS_SHOWN = 3


def rule_elsewhere(situation: Situation) -> Ruling | None:
    elsewhere = waits_of(situation).elsewhere
    if not elsewhere or not situation.waiting:
        return None
    lost = [one for one in situation.evidence.lost if elsewhere & set(one.ranks)]
    if lost:
        return _unheard(situation, lost)
    shared = situation.shared(situation.waiting)
    verb = "waits" if len(situation.waiting) == 1 else "wait"
    here = f"All {len(situation.ranks):,} ranks" if len(situation.waiting) == len(situation.ranks) > 1 else None
    who = here or ranks_text(situation.waiting, start=True)
    hosts = len(set(situation.evidence.hosts.values()))
    where = f"{hosts} hosts" if hosts > 1 else situation.evidence.host
    title = (
        f"{who} on {where} {verb} in {collective_text(shared)} for {ranks_text(elsewhere)} "
        "on other hosts: which of them is blocking the job cannot be determined here."
    )
    return Ruling(
        kind="rank_lost",
        title=title,
        victims=situation.waiting,
        undecidable=True,
        collective=shared,
        evidence=unanswered(situation),
    )


def _unheard(situation: Situation, lost: Sequence[LostHost]) -> Ruling:
    """Hosts that the hub no longer hears from, and whose ranks the others wait for."""
    guilty = {rank: one.host for one in lost for rank in one.ranks}
    names = [one.host for one in lost[:HOSTS_SHOWN]]
    names += [f"{len(lost) - HOSTS_SHOWN} more"] if len(lost) > HOSTS_SHOWN else []
    who = f"Host {names[0]} ({ranks_text(guilty)}) has" if len(lost) == 1 else f"Hosts {listed(names)} have"
    silent = more_than_text(min(one.silent_s for one in lost))
    return Ruling(
        kind="rank_lost",
        title=f"{who} been silent for {silent}{situation.wait_for(guilty)}.",
        culprits=tuple(
            Culprit(rank=rank, reason=f"is on host {host}, which stopped reporting")
            for rank, host in sorted(guilty.items())
        ),
        victims=situation.waiting,
        collective=situation.shared(situation.waiting),
        evidence=("Its agent is silent, too: the machine or the network to it is down.",),
    )


# -- kinds ------------------------------------------------------------------------------------------------------------
# Which kind of hang it is, and which rank is to blame. One function per kind; the first answer counts.
#
# Certain causes come first: a rank that is gone, stopped, or holds its GIL. Next, if no rank has an excuse, come ranks
# that block others by being elsewhere. The order of calls matters only if all ranks wait.

HOLDERS: tuple[Activity, ...] = ("disk", "input", "compile", "checkpoint", "evaluation", "computing", "blocked")
"""Activities of a rank that does not wait for another."""
ENDED_WELL = ("in order", "code 0", "normally")
SIDES_SHOWN = 3
SPINNING_SHARE = 0.8
SLEEPING_SHARE = 0.2
MANY = 8
FEW = 4
"""In a circle of at least ``MANY`` ranks, fewer than one in ``FEW`` are the odd ones."""


def rule_certain(situation: Situation) -> Ruling | None:
    """Causes that no work on other ranks excuses."""
    return _gone(situation) or _frozen(situation)


def rule_waiting(situation: Situation) -> Ruling:
    for rule in (_held_up, _disagreeing, _behind, _circle, _as_recorded, _mismatch, rule_elsewhere, _on_device):
        ruling = rule(situation)
        if ruling is not None:
            return ruling
    return _unknown(situation)


def _with(situation: Situation, kind: HangKind, guilty: Sequence[int], title: str, **more: object) -> Ruling:
    """Fill in the parts that all rulings share."""
    victims = tuple(rank for rank in situation.waiting if rank not in set(guilty))
    fields = {
        "culprits": culprits_of(situation, guilty),
        "victims": victims,
        "collective": situation.shared(_direct(situation, guilty, victims)),
        **more,
    }
    return Ruling(kind=kind, title=title, **fields)  # type: ignore[arg-type]


def _direct(situation: Situation, guilty: Sequence[int], victims: Sequence[int]) -> Sequence[int]:
    """The victims in a group with a culprit; the others wait for those."""
    near = []
    for victim in victims:
        waiting = situation.doings[victim].waiting_in
        if waiting is not None and (waiting.peer in guilty or situation.members_of(waiting) & set(guilty)):
            near.append(victim)
    return near or victims


def _accounts(situation: Situation, guilty: Sequence[int]) -> str:
    """The account of one rank, or of all if they are alike; otherwise of the first few."""
    doings = [situation.doings[rank] for rank in guilty]
    if alike(doings):
        return account(situation, guilty[0])[0]
    shown = [f"rank {rank} {account(situation, rank)[0]}" for rank in guilty[:SIDES_SHOWN]]
    more = f" and {len(guilty) - SIDES_SHOWN:,} more elsewhere" if len(guilty) > SIDES_SHOWN else ""
    return "; ".join(shown) + more


def _gone(situation: Situation) -> Ruling | None:
    gone = [rank for rank, doing in situation.doings.items() if doing.state == "gone"]
    ended = {rank: situation.ranks[rank].ended for rank in gone}
    badly = [rank for rank in gone if not any(words in ended[rank] for words in ENDED_WELL)]
    if len(gone) == len(situation.ranks) or not (badly or (gone and situation.waiting)):
        return None  # no rank is gone, or only ranks that had finished; the others are still working
    if not badly:
        return _missing(situation, gone)
    own = [rank for rank in badly if not _taken_along(ended[rank])]
    if not own and (disagreeing := _disagreeing(situation)) is not None:
        return disagreeing  # gloo ends ranks whose call did not match the call of their peers
    began = own or badly
    told = {situation.doings[rank].words for rank in began}
    if len(told) == 1:
        what = f"{'each ' if len(began) > 1 else ''}{told.pop()}"
    else:
        what = "; ".join(f"rank {rank} {situation.doings[rank].words}" for rank in began[:SIDES_SHOWN])
    step = situation.ranks[began[0]].step
    where = f" in step {step}" if step is not None and len(began) == 1 else ""
    title = f"{situation.who(began)}{':' if len(began) > 1 else ''} {what}{where}{situation.wait_for(began)}."
    others = [f"{ranks_text([rank])} {situation.doings[rank].words}" for rank in gone if rank not in began]
    evidence = (f"After it: {listed(others[:SIDES_SHOWN])}.",) if others else ()
    return _with(situation, "rank_crashed", began, title, evidence=evidence)


def _taken_along(ended: str) -> bool:
    kind, _, message = ended.removeprefix(RAISED).partition(": ")
    return "SIGTERM" in ended or lost_peer(kind, message)


def _frozen(situation: Situation) -> Ruling | None:
    states: tuple[Activity, ...] = ("stopped", "gil")
    guilty = [rank for rank, doing in situation.doings.items() if doing.state in states]
    if not guilty:
        return None
    title = f"{_subject(situation, guilty)}{situation.wait_for(guilty)}."
    signs = []
    for rank in guilty[:SIDES_SHOWN]:
        who = f"Rank {rank}"
        if situation.doings[rank].state == "gil":
            signs.append(f"{who} answers requests that need no Python, and none that do: its GIL is held.")
        else:
            signs.append(f"{who}: the kernel says that the process is stopped ({situation.ranks[rank].process_state}).")
    return _with(situation, "hang_host", guilty, title, evidence=tuple(signs))


def _subject(situation: Situation, guilty: Sequence[int]) -> str:
    """``Rank 1 sleeps at train.py:41``, ``Ranks 1, 3: each waits for a disk``."""
    told = _accounts(situation, guilty)
    if len(guilty) == 1:
        return f"{situation.who(guilty)} {told}"
    same = alike([situation.doings[rank] for rank in guilty])
    return f"{situation.who(guilty)}: {'each ' if same else ''}{told}"


def _held_up(situation: Situation) -> Ruling | None:
    guilty = [rank for rank, doing in situation.doings.items() if doing.state in HOLDERS]
    if not guilty:
        return None
    states = {situation.doings[rank].state for rank in guilty}
    victims = [rank for rank in situation.waiting if rank not in guilty]
    if "disk" in states:
        kind: HangKind = "hang_host"
    elif "input" in states:
        kind = "hang_input"
    else:
        kind = "hang_missing_collective" if victims else "hang_host"
    if kind != "hang_missing_collective":
        title = f"{_subject(situation, guilty)}{situation.wait_for(guilty)}."
        return _with(situation, kind, guilty, title, evidence=_idle(situation, guilty))
    return _missing(situation, guilty)


def _missing(situation: Situation, guilty: Sequence[int]) -> Ruling:
    """Others wait in a call that these ranks never made."""
    victims = [rank for rank in situation.waiting if rank not in guilty]
    called = collective_text(
        _other_end(situation, guilty, victims) or situation.shared(_direct(situation, guilty, victims))
    )
    same = alike([situation.doings[rank] for rank in guilty])
    it = "it" if len(guilty) == 1 else "each" if same else ""
    told = f"{it} {_accounts(situation, guilty)}".strip()
    title = f"{situation.who(guilty)} never called {called}: {told}{situation.wait_for(guilty, named=False)}."
    culprits = culprits_of(situation, guilty, before=f"has not called {called}; it")
    evidence = _idle(situation, guilty)
    return _with(situation, "hang_missing_collective", guilty, title, culprits=culprits, evidence=evidence)


def _other_end(situation: Situation, guilty: Sequence[int], victims: Sequence[int]) -> WaitingIn | None:
    """For a single culprit that a send or recv waits for: the call that it would have to make."""
    for victim in victims:
        waiting = situation.doings[victim].waiting_in
        if waiting is not None and is_p2p(waiting) and list(guilty) == [waiting.peer]:
            return replace(waiting, op="recv" if "send" in waiting.op else "send", peer=victim)
    return None


def _idle(situation: Situation, guilty: Sequence[int]) -> tuple[str, ...]:
    signs = []
    for rank in [rank for rank in guilty if situation.doings[rank].state != "gone"][:SIDES_SHOWN]:
        share, silent_s = situation.ranks[rank].cpu_share, situation.ranks[rank].silent_s
        used = f" and uses {share:.0%} of a core" if share is not None else ""
        signs.append(f"Rank {rank} has been silent for {duration_text(silent_s, whole=True)}{used}.")
    return tuple(signs)


def _circle(situation: Situation) -> Ruling | None:
    waits = waits_of(situation)
    for ranks in circles(waits.edges):
        point_to_point = [rank for rank in ranks if is_p2p(situation.doings[rank].waiting_in)]
        if point_to_point and len(point_to_point) < len(ranks):
            return _unmatched(situation, point_to_point)
        cycle = cycle_text(situation, waits, ranks)
        title = f"{situation.who(ranks)} wait for each other: {_sides(situation, ranks)}."
        guilty = _odd_ones(situation, ranks)
        return _with(situation, "hang_deadlock", guilty, title, cycle=cycle, collective=situation.shared(ranks))
    # If the peer of a send or recv is unknown, no circle can be found; but others that wait for these ranks show up.
    waited = {number for node, after in waits.edges.items() if node[0] for name, number in after if not name}
    point_to_point = [rank for rank in sorted(waited) if is_p2p(situation.doings[rank].waiting_in)]
    return _unmatched(situation, point_to_point) if point_to_point else None


def _odd_ones(situation: Situation, ranks: Sequence[int]) -> Sequence[int]:
    """All ranks of a circle; if there are many, only the few that are in a different call from the rest."""
    calls: dict[str, list[int]] = {}
    for rank in ranks:
        calls.setdefault(collective_text(situation.doings[rank].waiting_in), []).append(rank)
    most = max(calls.values(), key=len)
    few = [rank for rank in ranks if rank not in most]
    return few if len(ranks) >= MANY and len(few) * FEW < len(ranks) else ranks


def _unmatched(situation: Situation, guilty: Sequence[int]) -> Ruling:
    """Sends and recvs whose peer is in a collective: it waits for them, and they wait for it."""
    told = []
    for rank in guilty[:SIDES_SHOWN]:
        waiting = situation.doings[rank].waiting_in
        peer = waiting.peer if waiting is not None else None
        there = peer is not None and peer in situation.doings and peer not in guilty
        other = f", which {account(situation, peer)[0]}" if there and peer is not None else ""
        told.append(f"{'it' if len(guilty) == 1 else f'rank {rank}'} {account(situation, rank)[0]}{other}")
    shared = situation.shared([rank for rank in situation.waiting if rank not in guilty])
    called = collective_text(shared)
    title = f"{situation.who(guilty)} never called {called}: {'; '.join(told)}."
    culprits = culprits_of(situation, guilty, before=f"has not called {called}; it")
    return _with(situation, "hang_missing_collective", guilty, title, culprits=culprits)


def _sides(situation: Situation, ranks: Sequence[int]) -> str:
    """``ranks 0, 3 in all_reduce of mesh_dp, ranks 1, 2 in all_reduce of mesh_tp``."""
    sides: dict[str, list[int]] = {}
    for rank in ranks:
        waiting = situation.doings[rank].waiting_in
        sides.setdefault(collective_text(waiting), []).append(rank)
    parts = [f"{ranks_text(these)} in {call}" for call, these in sides.items()]
    more = [f"{len(parts) - SIDES_SHOWN} more groups"] if len(parts) > SIDES_SHOWN else []
    return listed([*parts[:SIDES_SHOWN], *more])


def _mismatch(situation: Situation) -> Ruling | None:
    """All ranks of a group are in a call, but not the same one. From the ring: no sequence numbers or shapes."""
    by_group: dict[str, dict[tuple[str, int], list[int]]] = {}
    for rank in situation.waiting:
        last, waiting = situation.ranks[rank].collective, situation.doings[rank].waiting_in
        queue = situation.recorders.queues.get(rank)
        if queue is not None and queue.stuck:
            continue  # on NCCL the host is ahead of the call that its device waits in
        if last is not None and last.waiting and waiting is not None and waiting.group and not is_p2p(waiting):
            by_group.setdefault(waiting.group, {}).setdefault((last.op, last.bytes), []).append(rank)
    for calls in by_group.values():
        # Receivers of a broadcast or scatter may pass other sizes than the sender: compare the op alone.
        ops = {op for op, _ in calls}
        if len(calls) < 2 or (len(ops) == 1 and ops & {"broadcast", "scatter", "gather", "all_to_all"}):
            continue
        sides = sorted(calls.items(), key=lambda side: -len(side[1]))
        split = len(sides[0][1]) == len(sides[1][1])
        guilty = sorted(rank for _, these in (sides if split else sides[1:]) for rank in these)
        told = [
            f"{ranks_text(these)} called {op}" + (f" with {size:,} bytes" if len(ops) == 1 else "")
            for (op, size), these in sides[:SIDES_SHOWN]
        ]
        group = group_text(situation.doings[guilty[0]].waiting_in or WaitingIn(group=""))
        title = f"The ranks of {group} are not in the same call: {listed(told)}."
        return _with(situation, "hang_mismatch", guilty, title, undecidable=split)
    return None


def _disagreeing(situation: Situation) -> Ruling | None:
    """The same from the Flight Recorders: which ranks requested something other than the others at the same number."""
    found = situation.recorders.verdict
    if found is None or found.kind != "hang_mismatch" or found.first_divergence is None:
        return None
    if situation.recorders.decided is not None:
        return _recorded(situation, found, "hang_mismatch")
    sides = found.first_divergence.call_sites
    told = [f"{ranks_text(side.ranks)} called {_call(side)}" for side in sides[:SIDES_SHOWN] if side.op]
    title = f"Number {_numbered(found)} is not the same call: {listed(told)}."
    suspects = [rank for rank in found.suspects if rank in situation.doings]
    more = {"undecidable": True, "collective": found.waiting_in, "evidence": found.evidence}
    return _with(situation, "hang_mismatch", suspects, title, **more)


def _numbered(found: Verdict) -> str:
    return f"{found.sequence} of {group_name(found.group or '', found.description)}"


def _call(side: Side) -> str:
    return " ".join(part for part in (side.op, side.sizes, side.dtypes) if part)


def _behind(situation: Situation) -> Ruling | None:
    """Ranks whose device has still not started what the others' started long ago: an earlier kernel does not end."""
    guilty = [rank for rank, doing in situation.doings.items() if doing.behind]
    if not guilty:
        return None
    waiting = situation.doings[guilty[0]].waiting_in
    owner = "its device has" if len(guilty) == 1 else "their devices have"
    title = f"{situation.who(guilty)}: {owner} not started {collective_text(waiting)}, which all ranks called, and "
    title += f"{'does' if len(guilty) == 1 else 'do'} not finish what comes before"
    reason = f"called {collective_text(waiting)}; its device does not finish what comes before it"
    culprits = []
    for rank in guilty:
        at = situation.doings[rank].at
        place = place_text(at, situation.evidence.source_lines)
        culprits.append(Culprit(rank=rank, reason=f"{reason}; its host is at {place}" if place else reason, at=at))
    evidence = (
        (
            f"According to the Flight Recorders of {ranks_text(situation.recorders.answered)}, "
            "other devices have started it."
        ),
        *_idle(situation, guilty),
    )
    more = {"culprits": tuple(culprits), "collective": waiting, "evidence": evidence}
    return _with(situation, "hang_device", guilty, f"{title}{situation.wait_for(guilty, named=False)}.", **more)


def _as_recorded(situation: Situation) -> Ruling | None:
    """Ranks that have not made the call that the others wait in, or whose device lags behind."""
    found = situation.recorders.decided
    if found is None or found.kind not in ("hang_missing_collective", "hang_input", "hang_device"):
        return None
    on_device = all(situation.doings[one.rank].state == "device" for one in found.culprits)
    return _recorded(situation, found, "hang_device" if on_device else found.kind)


def _recorded(situation: Situation, found: Verdict, kind: HangKind) -> Ruling:
    """The verdict of ``flight/`` with the current lines of the culprits."""
    guilty = [one.rank for one in found.culprits]
    lines = situation.evidence.source_lines
    culprits = []
    for one in found.culprits:
        at = situation.doings[one.rank].at or one.at
        if kind == "hang_mismatch" and _long_ago(situation, found, one.rank):
            at = one.at  # its host has left that line
        place = place_text(at, lines)
        culprits.append(Culprit(rank=one.rank, reason=f"{f'at {place} ' if place else ''}{one.reason}", at=at))
    if len({culprit.reason for culprit in culprits}) == 1:
        told = f"{': each' if len(guilty) > 1 else ''} {culprits[0].reason}"
    else:
        told = ": " + "; ".join(f"rank {one.rank} {one.reason}" for one in culprits[:SIDES_SHOWN])
    number = f" (number {_numbered(found)})" if kind == "hang_mismatch" else ""
    title = f"{situation.who(guilty)}{told}{number}{situation.wait_for(guilty, named=False)}."
    evidence = (f"According to the Flight Recorders of {ranks_text(situation.recorders.answered)}.", *found.evidence)
    more = {"culprits": tuple(culprits), "collective": found.waiting_in, "evidence": evidence}
    return _with(situation, kind, guilty, title, **more)


def _long_ago(situation: Situation, found: Verdict, rank: int) -> bool:
    """Whether the call in question has ended on that rank, which continued."""
    waiting = situation.doings[rank].waiting_in
    if waiting is None or waiting.sequence is None or found.sequence is None or waiting.peer is not None:
        return False
    same = (waiting.group, waiting.description) == (found.group, found.description)
    return same and waiting.sequence > found.sequence


def _on_device(situation: Situation) -> Ruling | None:
    waiting = [rank for rank, doing in situation.doings.items() if doing.state == "device"]
    found = situation.recorders.verdict
    if not waiting and found is not None and (found.kind == "hang_device" or _joined_on_gpus(situation, found)):
        return _unfinished(situation, found)
    if not waiting:
        return None
    several = len(situation.ranks) > 1
    place = _accounts(situation, waiting)
    each = "each " if len(waiting) > 1 and alike([situation.doings[rank] for rank in waiting]) else ""
    colon = ": " if len(waiting) > 1 else " "
    title = f"{situation.who(waiting)}{colon}{each}{place}, and the device does not finish."
    used = [
        f"The GPU of rank {rank} is {util:.0f}% busy."
        for rank in waiting[:SIDES_SHOWN]
        if (util := situation.ranks[rank].gpu_util_percent) is not None
    ]
    guilty = [] if several else waiting
    return _with(situation, "hang_device", guilty, title, undecidable=several, evidence=tuple(used))


def _joined_on_gpus(situation: Situation, found: Verdict) -> bool:
    """Whether all ranks, on GPUs, wait in a collective that all called: gloo waits for their devices as well."""
    together = found.kind == "hang_unknown" and found.waiting_in is not None and not found.wait_for
    return together and all(
        doing.state == "collective" and situation.ranks[rank].device.startswith("cuda")
        for rank, doing in situation.doings.items()
    )


def _unfinished(situation: Situation, found: Verdict) -> Ruling:
    """Identify the stuck device: a host thread may spin while it waits for its device, but sleeps for peers."""
    shares = {rank: situation.ranks[rank].cpu_share or 0.0 for rank in situation.waiting}
    spinning = [rank for rank, share in shares.items() if share >= SPINNING_SHARE]
    if (
        not spinning
        or situation.recorders.queues  # on NCCL, waiting for peers spins as well
        or len(spinning) == len(shares)
        or any(SLEEPING_SHARE < s < SPINNING_SHARE for s in shares.values())
    ):
        return _with(situation, "hang_device", (), found.title, undecidable=True, collective=found.waiting_in)
    what = collective_text(found.waiting_in) if found.waiting_in is not None else "a collective"
    owner = "its device has" if len(spinning) == 1 else "their devices have"
    title = f"{situation.who(spinning)}: {owner} not finished what comes before {what}, which all ranks called."
    others = "the others sleep" if len(shares) > 2 else "the other rank sleeps"
    evidence = tuple(f"Rank {rank} uses {shares[rank]:.0%} of a core waiting; {others}." for rank in spinning[:3])
    more = {"collective": found.waiting_in, "evidence": evidence}
    return _with(situation, "hang_device", spinning, title, **more)


def _unknown(situation: Situation) -> Ruling:
    silent = [rank for rank, doing in situation.doings.items() if doing.state == "unknown"]
    parts = []
    if situation.waiting:
        shared = situation.shared(situation.waiting)
        verb = "waits" if len(situation.waiting) == 1 else "wait"
        parts.append(f"{ranks_text(situation.waiting)} {verb} in {collective_text(shared)}")
    if silent:
        parts.append(f"what {ranks_text(silent)} {'does' if len(silent) == 1 else 'do'} is unknown")
    told = f": {listed(parts)}" if parts else ""
    title = f"The job hangs for an unknown reason{told}."
    return _with(situation, "hang_unknown", (), title, undecidable=True, evidence=unanswered(situation))


# -- judge ------------------------------------------------------------------------------------------------------------


def judge(evidence: Evidence, *, number: int, declared_wall_ns: int, stopped_wall_ns: int) -> HangRecord | NotAHang:
    recorders = read_recorders(evidence)
    situation = situation_of(evidence, recorders)
    rest = at_rest(evidence, situation.doings.values())
    if rest is not None:
        return rest
    ruling = rule_certain(situation)
    if ruling is None:
        excuse = (
            under_way(evidence, recorders)
            or excuse_of(evidence, situation.doings.values())
            or unfinished(evidence, recorders)
        )
        if excuse is not None:
            return excuse
        ruling = rule_waiting(situation)
    return HangRecord(
        number=number,
        host=evidence.host,
        kind=ruling.kind,
        title=ruling.title,
        declared_wall_ns=declared_wall_ns,
        stopped_wall_ns=stopped_wall_ns,
        threshold_s=evidence.threshold_s,
        step_s=evidence.step_s,
        culprits=ruling.culprits,
        victims=ruling.victims,
        undecidable=ruling.undecidable,
        collective=ruling.collective,
        cycle=ruling.cycle,
        evidence=ruling.evidence,
        ranks=tuple(_there(situation, rank) for rank in situation.ranks),
        stacks=_stacks(situation),
        flight=_flight(recorders.verdict),
    )


def _flight(verdict: Verdict | None) -> dict[str, Any]:
    """The verdict as a dict, without what the record contains itself."""
    if verdict is None:
        return {}
    return {key: value for key, value in encoded(verdict.to_dict()).items() if key not in ("schema", "stacks")}


def _there(situation: Situation, number: int) -> RankThere:
    rank, doing = situation.ranks[number], situation.doings[number]
    return RankThere(
        rank=number,
        pid=rank.pid,
        alive=doing.state != "gone",
        step=rank.step,
        phase=rank.phase,
        since_s=rank.silent_s,
        process_state=rank.process_state,
        cpu_share=rank.cpu_share,
        gil_held=rank.gil_held,
        waiting_in=doing.waiting_in,
        at=doing.at,
        workers=tuple(_worker(situation, number)),
        host=situation.evidence.hosts.get(number, ""),
    )


def _worker(situation: Situation, number: int) -> list[dict[str, Any]]:
    lines = situation.evidence.source_lines
    rows = []
    for worker in situation.ranks[number].workers:
        where = place_text(user_frame(worker.threads), lines)
        rows.append(
            {
                "pid": worker.pid,
                "kind": worker.kind,
                "name": one_line(worker.name, 80),
                "state": worker.process_state,
                "cpu_share": worker.cpu_share,
                "at": where or None,
            }
        )
    return rows


def _stacks(situation: Situation) -> tuple[StackGroup, ...]:
    own = {number: rank.threads for number, rank in situation.ranks.items() if rank.threads}
    groups = list(group_stacks(own))
    workers: dict[tuple[Any, ...], set[int]] = {}
    for number, rank in situation.ranks.items():
        for worker in rank.workers:
            if worker.threads:
                workers.setdefault(worker.threads, set()).add(number)
    groups += [
        StackGroup(ranks=tuple(sorted(ranks)), threads=threads, workers_of=True) for threads, ranks in workers.items()
    ]
    return tuple(groups)
