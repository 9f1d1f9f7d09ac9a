"""Judge a hang, of a live job or from the files that it left: which kind it is and which rank is to blame.

    answer = judge(evidence, number=1, declared_wall_ns=now, stopped_wall_ns=then)
    if isinstance(answer, NotAHang): check again in answer.check_again_s

    document = judge_dumps(reading.dumps, stacks=reading.stacks, errors=reading.errors)

Both sources go through the same rules, ``RULES``: the first that has an answer counts. Before them come reasons why it
is not a hang (``hangs/excuses.py``). Pure: the same evidence gives the same answer, and no evidence makes it raise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from stepscope.flight.dump import HOST_BACKENDS, Dump
from stepscope.flight.stacks import RankLog, group_stacks, lost_peer, user_frame
from stepscope.flight.wording import (
    collective_text,
    frame_text,
    group_text,
    listed,
    more_than_text,
    one_line,
    operation_text,
    parting_frame,
    place_text,
    ranks_text,
)
from stepscope.hangs import activity
from stepscope.hangs.activity import Activity, Doing
from stepscope.hangs.alignment import Divergence, Group, usually_follows
from stepscope.hangs.case import Case, Verdict, case_of
from stepscope.hangs.evidence import RAISED, Evidence, LostHost, RankEvidence, WorkerEvidence, evidence_of_files
from stepscope.hangs.excuses import NotAHang, at_rest, dumps_in_order, excuse_of
from stepscope.hangs.flight_document import flight_document
from stepscope.hangs.recorded import Joined, waiting_in
from stepscope.hangs.thresholds import FEW_OF_CIRCLE, SLEEPING_SHARE, SPINNING_SHARE
from stepscope.hangs.wait_graph import cycle_sentences, is_p2p
from stepscope.records.dataclass_json import encoded
from stepscope.records.hang import (
    Culprit,
    Frame,
    HangKind,
    HangRecord,
    RankThere,
    StackGroup,
    ThreadStack,
    WaitingIn,
)
from stepscope.records.text import duration_text

__all__ = ["NotAHang", "judge", "judge_dumps"]

SHOWN = 3
"""Ranks, sides or hosts that a sentence describes one by one."""

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


def account(case: Case, rank: int) -> tuple[str, Frame | None]:
    """``sleeps at train.py:41 (time.sleep(999))`` and the most important line."""
    doing, evidence = case.doings[rank], case.ranks[rank]
    lines = case.evidence.source_lines
    if doing.state == "gone":
        step = f" in step {evidence.step}" if evidence.step is not None else ""
        return f"{doing.words}{step}", doing.at
    words = doing.words
    if doing.state == "collective":
        words = f"waits in {collective_text(doing.waiting_in)}"
    elif doing.state in LONG and not case.evidence.from_files:
        words = f"has been {LONG[doing.state]} for {more_than_text(evidence.silent_s)}"
    place = place_text(doing.at, lines) or _innermost(evidence)
    text = f"{words} at {place}" if place else words
    if doing.state != "input":
        return text, doing.at
    worker = blamed_worker(evidence)
    if worker is not None:
        frame = user_frame(worker.threads)
        at = place_text(frame, lines)
        return f"{text}; {worker_words(worker, lines)}{f' at {at}' if at else ''}", frame or doing.at
    if case.evidence.from_files:
        return text, doing.at
    if _waits_for_workers(evidence) and not any(worker.kind == "dataloader" for worker in evidence.workers):
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


def culprits_of(case: Case, ranks: Sequence[int], *, before: str = "") -> tuple[Culprit, ...]:
    """The culprits with reasons. ``before``: text that precedes each reason (``has not called all_reduce; it``)."""
    found = []
    for rank in sorted(ranks):
        text, at = account(case, rank)
        found.append(Culprit(rank=rank, reason=f"{before} {text}".strip(), at=at))
    return tuple(found)


def _waits_for_workers(rank: RankEvidence) -> bool:
    return any(frame.function in ("_try_get_data", "_get_data") for frame in activity.main_frames(rank.threads))


def _innermost(rank: RankEvidence) -> str:
    """The innermost frame, if there is no user frame."""
    frames = activity.main_frames(rank.threads)
    return f"{place_text(frames[0], {})}, in {frames[0].function}" if frames and frames[0].line else ""


def alike(doings: Sequence[Doing]) -> bool:
    """Whether all of these do the same at the same line, so that one sentence covers them."""
    return len({(doing.state, doing.words, doing.at) for doing in doings}) == 1


# -- rules ------------------------------------------------------------------------------------------------------------
# Which kind of hang it is, and which rank is to blame. One function per cause; ``RULES`` at the end has their order.

HOLDERS: tuple[Activity, ...] = ("disk", "input", "compile", "checkpoint", "evaluation", "computing", "blocked")
"""Activities of a rank that does not wait for another."""
ENDED_WELL = ("in order", "code 0", "normally")


@dataclass(frozen=True)
class Rule:
    decide: Callable[[Case], Verdict | None]
    _: KW_ONLY
    evidence: str
    """What it needs: Flight Recorders (of either source), live ranks, files, or either."""
    cause: str


def _verdict(case: Case, kind: HangKind, guilty: Sequence[int], title: str, **more: Any) -> Verdict:
    """Fill in the parts that all verdicts share."""
    victims = case.victims_of(guilty)
    fields: dict[str, Any] = {"victims": victims, **more}
    if "culprits" not in fields:
        fields["culprits"] = culprits_of(case, guilty)
    if "collective" not in fields:
        fields["collective"] = case.call_missing(guilty, _direct(case, guilty, victims))
    return Verdict(kind=kind, title=title, **fields)


def _direct(case: Case, guilty: Collection[int], victims: Sequence[int]) -> Sequence[int]:
    """The victims in a group with a culprit; the others wait for those."""
    near = []
    for victim in victims:
        call = case.doings[victim].waiting_in
        if call is not None and (call.peer in guilty or case.members_of(call) & set(guilty)):
            near.append(victim)
    return near or victims


def _subject(case: Case, guilty: Sequence[int]) -> str:
    """``Rank 1 sleeps at train.py:41``, ``Ranks 1, 3: each waits for a disk``."""
    text = _accounts(case, guilty)
    if len(guilty) == 1:
        return f"{case.who(guilty)} {text}"
    same = alike([case.doings[rank] for rank in guilty])
    return f"{case.who(guilty)}: {'each ' if same else ''}{text}"


def _accounts(case: Case, guilty: Sequence[int]) -> str:
    """The account of one rank, or of all if they are alike; otherwise of the first few."""
    if alike([case.doings[rank] for rank in guilty]):
        return account(case, guilty[0])[0]
    shown = [f"rank {rank} {account(case, rank)[0]}" for rank in guilty[:SHOWN]]
    more = f" and {len(guilty) - SHOWN:,} more elsewhere" if len(guilty) > SHOWN else ""
    return "; ".join(shown) + more


def _together(case: Case, culprits: Sequence[Culprit]) -> str:
    """The subject with the reasons of all, once if they are the same."""
    if len({culprit.reason for culprit in culprits}) == 1:
        text = f"{': each' if len(culprits) > 1 else ''} {culprits[0].reason}"
    else:
        text = ": " + "; ".join(f"rank {culprit.rank} {culprit.reason}" for culprit in culprits[:SHOWN])
    return f"{case.who([culprit.rank for culprit in culprits])}{text}"


def _silence(case: Case, guilty: Sequence[int]) -> tuple[str, ...]:
    signs = []
    for rank in [rank for rank in guilty if case.doings[rank].state != "gone"][:SHOWN]:
        share, silent_s = case.ranks[rank].cpu_share, case.ranks[rank].silent_s
        used = f" and uses {share:.0%} of a core" if share is not None else ""
        signs.append(f"Rank {rank} has been silent for {duration_text(silent_s, whole=True)}{used}.")
    return () if case.evidence.from_files else tuple(signs)


# -- ranks that are gone or cannot run --------------------------------------------------------------------------------


def _gone(case: Case) -> Verdict | None:
    gone = [rank for rank, doing in case.doings.items() if doing.state == "gone"]
    ended = {rank: case.ranks[rank].ended for rank in gone}
    badly = [rank for rank in gone if not any(words in ended[rank] for words in ENDED_WELL)]
    if not (badly or (gone and case.waiting)):
        return None  # no rank is gone, or only ranks that had finished; the others are still working
    if not badly:
        return _missing(case, gone)
    own = [rank for rank in badly if case.evidence.from_files or not _taken_along(ended[rank])]
    if not own and (diverged := _diverged(case)) is not None and diverged.kind == "hang_mismatch":
        return diverged  # gloo ends ranks whose call did not match the call of their peers
    first = own or badly
    words = {case.doings[rank].words for rank in first}
    if len(words) == 1:
        what = f"{'each ' if len(first) > 1 else ''}{words.pop()}"
    else:
        what = "; ".join(f"rank {rank} {case.doings[rank].words}" for rank in first[:SHOWN])
    step = case.ranks[first[0]].step
    where = f" in step {step}" if step is not None and len(first) == 1 else ""
    title = f"{case.who(first)}{':' if len(first) > 1 else ''} {what}{where}{case.wait_text(first)}."
    others = [f"{ranks_text([rank])} {case.doings[rank].words}" for rank in gone if rank not in first]
    evidence = (f"After it: {listed(others[:SHOWN])}.",) if others else ()
    return _verdict(case, "rank_crashed", first, title, evidence=evidence)


def _taken_along(ended: str) -> bool:
    kind, _, message = ended.removeprefix(RAISED).partition(": ")
    return "SIGTERM" in ended or lost_peer(kind, message)


def _frozen(case: Case) -> Verdict | None:
    """Processes that are stopped, or in a C call that holds the GIL."""
    guilty = [rank for rank, doing in case.doings.items() if doing.state in ("stopped", "gil")]
    if not guilty:
        return None
    signs = []
    for rank in guilty[:SHOWN]:
        if case.doings[rank].state == "gil":
            signs.append(f"Rank {rank} answers requests that need no Python, and none that do: its GIL is held.")
        else:
            state = case.ranks[rank].process_state
            signs.append(f"Rank {rank}: the kernel says that the process is stopped ({state}).")
    title = f"{_subject(case, guilty)}{case.wait_text(guilty)}."
    return _verdict(case, "hang_host", guilty, title, evidence=tuple(signs))


# -- ranks that did not come ------------------------------------------------------------------------------------------


def _elsewhere(case: Case) -> Verdict | None:
    """Ranks that are seen outside of any collective."""
    guilty = [rank for rank, doing in case.doings.items() if doing.state in HOLDERS]
    if not guilty:
        return None
    states = {case.doings[rank].state for rank in guilty}
    if "disk" not in states and "input" not in states and case.victims_of(guilty):
        return _missing(case, guilty)
    kind: HangKind = "hang_input" if "input" in states and "disk" not in states else "hang_host"
    title = f"{_subject(case, guilty)}{case.wait_text(guilty)}."
    return _verdict(case, kind, guilty, title, evidence=_silence(case, guilty))


def _missing(case: Case, guilty: Sequence[int], kind: HangKind = "hang_missing_collective") -> Verdict:
    """Others wait in a call that these ranks never made."""
    victims = case.victims_of(guilty)
    call = _other_end(case, guilty, victims) or case.call_missing(guilty, _direct(case, guilty, victims))
    called = collective_text(call)
    it = "it" if len(guilty) == 1 else "each" if alike([case.doings[rank] for rank in guilty]) else ""
    text = f"{it} {_accounts(case, guilty)}".strip()
    title = f"{case.who(guilty)} never called {called}: {text}{case.wait_text(guilty, named=False)}."
    culprits = culprits_of(case, guilty, before=f"has not called {called}; it")
    return _verdict(case, kind, guilty, title, culprits=culprits, evidence=_silence(case, guilty))


def _other_end(case: Case, guilty: Sequence[int], victims: Sequence[int]) -> WaitingIn | None:
    """For a single culprit that a send or recv waits for: the call that it would have to make."""
    for victim in victims:
        call = case.doings[victim].waiting_in
        if call is not None and is_p2p(call) and list(guilty) == [call.peer]:
            return replace(call, op="recv" if "send" in call.op else "send", peer=victim)
    return None


def _not_called(case: Case) -> Verdict | None:
    """Ranks that others wait for and that wait for none, according to their Flight Recorders."""
    guilty = [rank for rank in case.recorded.graph.ends if rank in case.recorded.dumps and rank in case.doings]
    if not guilty or case.dumps_were_taken_while_running:
        return None
    on_device = all(case.doings[rank].state == "device" for rank in guilty)
    found = _missing(case, guilty, "hang_device" if on_device else "hang_missing_collective")
    return replace(found, evidence=(*_recorders(case), *found.evidence))


def _no_dump(case: Case) -> Verdict | None:
    """From files: all ranks wait for ranks that left no dump, and no stack that shows where they are."""
    ends = case.recorded.graph.ends
    in_p2p = any(is_p2p(case.doings[rank].waiting_in) for rank in ends if rank in case.doings)
    if not case.evidence.from_files or not ends or in_p2p or not case.recorded.dumps.keys().isdisjoint(ends):
        return None
    unread = [rank for rank in ends if rank in case.evidence.unreadable]
    lost_connection = any(not failure.own for failure in case.recorded.failures.values())
    decided = not unread and 2 * len(ends) <= len(case.recorded.world)
    kind: HangKind = "rank_crashed" if lost_connection else "hang_unknown" if unread else "rank_lost"
    why = "left no dump"
    if unread:
        why = "has a dump that cannot be read" if len(ends) == 1 else "have no usable dump"
    reason = "left no dump, and others lost their connection to it" if lost_connection else "left no dump"
    return _verdict(
        case,
        kind,
        ends,
        f"{ranks_text(ends, start=True)} {why}{case.wait_text(ends)}.",
        culprits=tuple(Culprit(rank=rank, reason=reason) for rank in ends) if decided else (),
        suspects=() if decided else ends,
        undecidable=not decided,
    )


def _other_hosts(case: Case) -> Verdict | None:
    """Ranks that wait for ranks on lost hosts, or on hosts that did not report."""
    absent = case.absent
    if not absent or not case.waiting or case.evidence.from_files:
        return None
    lost = [host for host in case.evidence.lost if absent & set(host.ranks)]
    if lost:
        return _lost_hosts(case, lost)
    shared = case.shared(case.waiting)
    verb = "waits" if len(case.waiting) == 1 else "wait"
    here = f"All {len(case.ranks):,} ranks" if len(case.waiting) == len(case.ranks) > 1 else None
    who = here or ranks_text(case.waiting, start=True)
    hosts = len(set(case.evidence.hosts.values()))
    where = f"{hosts} hosts" if hosts > 1 else case.evidence.host
    title = (
        f"{who} on {where} {verb} in {collective_text(shared)} for {ranks_text(absent)} "
        "on other hosts: which of them is blocking the job cannot be determined here."
    )
    return _verdict(case, "rank_lost", (), title, undecidable=True, collective=shared, evidence=_no_stacks(case))


def _lost_hosts(case: Case, lost: Sequence[LostHost]) -> Verdict:
    guilty = {rank: host.host for host in lost for rank in host.ranks}
    names = [host.host for host in lost[:SHOWN]]
    names += [f"{len(lost) - SHOWN} more"] if len(lost) > SHOWN else []
    who = f"Host {names[0]} ({ranks_text(guilty)}) has" if len(lost) == 1 else f"Hosts {listed(names)} have"
    silent = more_than_text(min(host.silent_s for host in lost))
    return Verdict(
        kind="rank_lost",
        title=f"{who} been silent for {silent}{case.wait_text(guilty)}.",
        culprits=tuple(
            Culprit(rank=rank, reason=f"is on host {host}, which stopped reporting")
            for rank, host in sorted(guilty.items())
        ),
        victims=case.waiting,
        collective=case.shared(case.waiting),
        evidence=("Its agent is silent, too: the machine or the network to it is down.",),
    )


# -- ranks that made another call -------------------------------------------------------------------------------------


def _diverged(case: Case) -> Verdict | None:
    """Ranks that made another call than the others, according to their Flight Recorders."""
    if not case.recorded.divergences or case.recorded.lagging:
        return None
    group, left = min(case.recorded.divergences, key=lambda found: found[0].first_called_ns(found[1].sequence))
    skipped = _skipped(case, group, left)
    if skipped:
        left = replace(left, ranks=skipped)
    others = [rank for side in left.sides for rank in side if rank not in left.ranks]
    waiting = group.waiting
    stuck = next((rank for rank in others if rank in waiting), next(iter(waiting)))
    number = f"{left.sequence} of {group.name}"
    more: dict[str, Any] = {"collective": waiting_in(group, stuck, waiting[stuck]), "divergence": (group, left)}
    note = _ended_unlike(group, left.sequence, stuck) if left.differs != "call site" else ()
    if not left.ranks:
        sides = [
            f"{ranks_text(side)} {_call_made(group, side, left, _parting_lines(case, group, left, side)[0])}"
            for side in left.sides[:SHOWN]
        ]
        suspects = sorted(rank for side in left.sides for rank in side if rank in case.doings)
        title = f"Number {number} is not the same call: {listed(sides)}."
        return _verdict(case, "hang_mismatch", suspects, title, undecidable=True, evidence=note, **more)
    culprits = tuple(_accuse(case, group, left, rank, skipped=bool(skipped)) for rank in left.ranks)
    title = f"{_together(case, culprits)} (number {number}){case.wait_text(left.ranks, named=False)}."
    more |= {"culprits": culprits, "evidence": (*_recorders(case), *note)}
    return _verdict(case, "hang_missing_collective" if skipped else "hang_mismatch", left.ranks, title, **more)


def _accuse(case: Case, group: Group, left: Divergence, rank: int, *, skipped: bool) -> Culprit:
    """Name both calls, and the line where the rank is; if it has left that call, the line where its path diverged."""
    side = next(side for side in left.sides if rank in side)
    others = _other_side(left, side)
    ours, theirs = _parting_lines(case, group, left, side)
    did, they = _call_made(group, side, left, ours), _call_made(group, others, left, theirs)
    reason = f"{did} where {ranks_text(others)} {they}"
    if skipped:
        reason = f"left out the call that {ranks_text(others)} made ({they.removeprefix('called ')}), and {did}"
    if case.evidence.from_files:
        return Culprit(rank=rank, reason=reason, at=ours)
    doing = case.doings[rank]
    has_left = not skipped and _has_left(doing.waiting_in, group, left.sequence)
    at = ours if has_left else doing.at or ours
    in_that_call = at is not None and ours is not None and (at.file, at.line) == (ours.file, ours.line)
    place = "" if in_that_call else place_text(at, case.evidence.source_lines)
    return Culprit(rank=rank, reason=f"{f'at {place} ' if place else ''}{reason}", at=at)


def _other_side(left: Divergence, side: Sequence[int]) -> tuple[int, ...]:
    """The ranks to compare with: those that did not diverge."""
    others = [other for other in left.sides if other != side]
    return next((other for other in others if not set(other) & set(left.ranks)), (*others, left.sides[0])[0])


def _parting_lines(
    case: Case, group: Group, left: Divergence, side: Sequence[int]
) -> tuple[Frame | None, Frame | None]:
    """The lines where the path of a side and that of the others part."""
    ours, theirs = (_call_site(case, group, ranks[0], left.sequence) for ranks in (side, _other_side(left, side)))
    return parting_frame(ours, theirs), parting_frame(theirs, ours)


def _call_site(case: Case, group: Group, rank: int, sequence: int) -> tuple[Frame, ...]:
    """The call site of a rank: as recorded, or from its stack if it waits there now."""
    recorded = group.progress[rank].site(sequence)
    operation = group.progress[rank].operation(sequence)
    ahead = operation is not None and operation.backend not in HOST_BACKENDS  # of the device: the stack says nothing
    if recorded or ahead or group.waiting.get(rank) != sequence or rank not in case.ranks:
        return recorded
    return next((thread.frames for thread in case.ranks[rank].threads if thread.main), ())


def _call_made(group: Group, side: Sequence[int], left: Divergence, frame: Frame | None) -> str:
    operation = group.progress[side[0]].operation(left.sequence)
    at = frame_text(frame)
    return f"called {operation_text(operation) if operation else 'nothing'}{' at ' if at else ''}{at}"


def _has_left(call: WaitingIn | None, group: Group, sequence: int) -> bool:
    """Whether a rank that waits in this call has ended the one of that number, and continued."""
    if call is None or call.sequence is None or call.peer is not None:
        return False
    return (call.group, call.description) == group.key and call.sequence > sequence


def _skipped(case: Case, group: Group, left: Divergence) -> tuple[int, ...]:
    """Ranks that skipped the call that the others wait in and continued; empty if they made another call instead.

    If the call occurred before, what followed it then decides; on its first occurrence, the side that is further on in
    the same function.
    """
    if left.differs == "call site" or len(left.sides) != 2:
        return ()
    first, second = left.sides
    usual = {
        side: usually_follows(group, side[0], other[0], left.sequence)
        for side, other in ((first, second), (second, first))
    }
    skipped = [side for side, follows in usual.items() if follows]
    if not skipped and left.differs == "operation" and not any(follows is False for follows in usual.values()):
        ours, theirs = _parting_lines(case, group, left, first)
        if ours is not None and theirs is not None and (ours.file, ours.function) == (theirs.file, theirs.function):
            skipped = [first] if ours.line > theirs.line else [second] if theirs.line > ours.line else []
    return skipped[0] if len(skipped) == 1 and set(left.ranks) <= set(skipped[0]) else ()


def _ended_unlike(group: Group, sequence: int, stuck: int) -> tuple[str, ...]:
    """A note on ranks that made different calls there and continued."""
    if any(not progress.has_ended(sequence) for progress in group.progress.values()):
        return ()
    now = collective_text(waiting_in(group, stuck, group.waiting[stuck]))
    text = f"Collective {sequence} still completed, because NCCL does not check that calls match."
    return (f"{text} After it the ranks were out of step, until they hung in {now}.",)


def _recorders(case: Case, what: str = "") -> tuple[str, ...]:
    """The source of a verdict on live ranks."""
    text = f"According to the Flight Recorders of {ranks_text(case.recorded.dumps)}{what}."
    return () if case.evidence.from_files else (text,)


def _unlike_in_rings(case: Case) -> Verdict | None:
    """All ranks of a group are in a call, but not the same one. From the ring: no sequence numbers or shapes."""
    by_group: dict[str, dict[tuple[str, int], list[int]]] = {}
    for rank in case.waiting:
        last, call = case.ranks[rank].collective, case.doings[rank].waiting_in
        queue = case.recorded.queues.get(rank)
        if queue is not None and queue.stuck:
            continue  # on NCCL the host is ahead of the call that its device waits in
        if last is not None and last.waiting and call is not None and call.group and not is_p2p(call):
            by_group.setdefault(call.group, {}).setdefault((last.op, last.bytes), []).append(rank)
    for calls in by_group.values():
        # Receivers of a broadcast or scatter may pass other sizes than the sender: compare the op alone.
        ops = {op for op, _ in calls}
        if len(calls) < 2 or (len(ops) == 1 and ops & {"broadcast", "scatter", "gather", "all_to_all"}):
            continue
        sides = sorted(calls.items(), key=lambda side: -len(side[1]))
        split = len(sides[0][1]) == len(sides[1][1])
        guilty = sorted(rank for _, ranks in (sides if split else sides[1:]) for rank in ranks)
        texts = [
            f"{ranks_text(ranks)} called {op}" + (f" with {size:,} bytes" if len(ops) == 1 else "")
            for (op, size), ranks in sides[:SHOWN]
        ]
        group = group_text(case.doings[guilty[0]].waiting_in or WaitingIn(group=""))
        title = f"The ranks of {group} are not in the same call: {listed(texts)}."
        return _verdict(case, "hang_mismatch", guilty, title, undecidable=split)
    return None


# -- ranks that wait for each other -----------------------------------------------------------------------------------


def _circle(case: Case) -> Verdict | None:
    circle = case.graph.circle()
    if circle:
        in_p2p = [rank for rank in circle if is_p2p(case.doings[rank].waiting_in)]
        if in_p2p and len(in_p2p) < len(circle):
            return _unmatched(case, in_p2p)
        steps = case.graph.cycle(circle[0])
        if not case.evidence.from_files:  # there each rank has one call, and its own form of it
            steps = tuple((rank, other, case.doings[rank].waiting_in or call) for rank, other, call in steps)
        title = f"{case.who(circle)} wait for each other: {_sides(case, circle)}."
        more = {"cycle": cycle_sentences(steps), "collective": case.shared(circle)}
        return _verdict(case, "hang_deadlock", _odd_ones(case, circle), title, **more)
    # If the peer of a send or recv is unknown, no circle can be found; but others that wait for these ranks show up.
    missing = {rank for wait in case.graph.waits if not is_p2p(wait.call) for rank in wait.missing}
    in_p2p = [rank for rank in sorted(missing & case.doings.keys()) if is_p2p(case.doings[rank].waiting_in)]
    return _unmatched(case, in_p2p) if in_p2p else None


def _odd_ones(case: Case, ranks: Sequence[int]) -> Sequence[int]:
    """All ranks of a circle, or only the few that are in a different call from the rest."""
    calls: dict[str, list[int]] = {}
    for rank in ranks:
        calls.setdefault(collective_text(case.doings[rank].waiting_in), []).append(rank)
    most = max(calls.values(), key=len)
    few = sorted(set(ranks).difference(most))
    return few if few and len(few) < FEW_OF_CIRCLE * len(ranks) else ranks


def _unmatched(case: Case, guilty: Sequence[int]) -> Verdict:
    """Sends and recvs whose peer is in a collective: it waits for them, and they wait for it."""
    texts = []
    for rank in guilty[:SHOWN]:
        call = case.doings[rank].waiting_in
        peer = call.peer if call is not None else None
        known = peer is not None and peer in case.doings and peer not in guilty
        other = f", which {account(case, peer)[0]}" if known and peer is not None else ""
        texts.append(f"{'it' if len(guilty) == 1 else f'rank {rank}'} {account(case, rank)[0]}{other}")
    called = collective_text(case.call_missing(guilty, case.victims_of(guilty)))
    title = f"{case.who(guilty)} never called {called}: {'; '.join(texts)}."
    culprits = culprits_of(case, guilty, before=f"has not called {called}; it")
    return _verdict(case, "hang_missing_collective", guilty, title, culprits=culprits)


def _sides(case: Case, ranks: Sequence[int]) -> str:
    """``ranks 0, 3 in all_reduce of mesh_dp, ranks 1, 2 in all_reduce of mesh_tp``."""
    sides: dict[str, list[int]] = {}
    for rank in ranks:
        sides.setdefault(collective_text(case.doings[rank].waiting_in), []).append(rank)
    parts = [f"{ranks_text(side)} in {call}" for call, side in sides.items()]
    more = [f"{len(parts) - SHOWN} more groups"] if len(parts) > SHOWN else []
    return listed([*parts[:SHOWN], *more])


# -- devices ----------------------------------------------------------------------------------------------------------


def _lagging(case: Case) -> Verdict | None:
    """Ranks whose device has not ended what has ended on their peers."""
    recorded = case.recorded
    guilty = sorted(recorded.lagging)
    decided = recorded.lagging_decided
    if not guilty or not (decided or case.evidence.from_files):
        return None
    culprits = []
    for rank in guilty:
        group, sequence = recorded.lagging[rank]
        ended = [other for other, progress in group.progress.items() if progress.has_ended(sequence)]
        call = collective_text(waiting_in(group, rank, sequence))
        at = case.doings[rank].at if rank in case.doings else None
        place = place_text(at, case.evidence.source_lines)
        reason = f"never saw {call} complete, although {ranks_text(ended)} did; its device has stopped"
        culprits.append(Culprit(rank=rank, reason=f"{f'at {place} ' if place else ''}{reason}", at=at))
    group, sequence = recorded.lagging[guilty[0]]
    whose, theirs = ("its device has", "its") if len(guilty) == 1 else ("their devices have", "their")
    call = collective_text(waiting_in(group, guilty[0], sequence))
    title = f"{case.who(guilty)}: {whose} not ended {call}, which has ended on {theirs} peers"
    return _verdict(
        case,
        "hang_device",
        guilty,
        f"{title}{case.wait_text(guilty, named=False)}.",
        culprits=tuple(culprits),
        undecidable=not decided,
        collective=waiting_in(group, guilty[0], sequence),
        evidence=_recorders(case),
        place=(group, sequence),
    )


def _behind(case: Case) -> Verdict | None:
    """Ranks whose device has still not started what the others' started long ago: an earlier kernel does not end."""
    guilty = [rank for rank, doing in case.doings.items() if doing.behind]
    if not guilty:
        return None
    call = case.doings[guilty[0]].waiting_in
    owner = "its device has" if len(guilty) == 1 else "their devices have"
    title = f"{case.who(guilty)}: {owner} not started {collective_text(call)}, which all ranks called, and "
    title += f"{'does' if len(guilty) == 1 else 'do'} not finish what comes before"
    reason = f"called {collective_text(call)}; its device does not finish what comes before it"
    culprits = []
    for rank in guilty:
        at = case.doings[rank].at
        place = place_text(at, case.evidence.source_lines)
        culprits.append(Culprit(rank=rank, reason=f"{reason}; its host is at {place}" if place else reason, at=at))
    return _verdict(
        case,
        "hang_device",
        guilty,
        f"{title}{case.wait_text(guilty, named=False)}.",
        culprits=tuple(culprits),
        collective=call,
        evidence=(*_recorders(case, ", other devices have started it"), *_silence(case, guilty)),
    )


def _on_device(case: Case) -> Verdict | None:
    """Hosts that wait for their devices."""
    waiting = [rank for rank, doing in case.doings.items() if doing.state == "device"]
    if not waiting:
        return None
    several = len(case.ranks) > 1
    each = "each " if len(waiting) > 1 and alike([case.doings[rank] for rank in waiting]) else ""
    colon = ": " if len(waiting) > 1 else " "
    title = f"{case.who(waiting)}{colon}{each}{_accounts(case, waiting)}, and the device does not finish."
    used = [
        f"The GPU of rank {rank} is {util:.0f}% busy."
        for rank in waiting[:SHOWN]
        if (util := case.ranks[rank].gpu_util_percent) is not None
    ]
    guilty = [] if several else waiting
    return _verdict(case, "hang_device", guilty, title, undecidable=several, evidence=tuple(used))


def _all_joined(case: Case) -> Verdict | None:
    """All ranks called it and none saw its end: a device or the network is stuck, or it was still in progress."""
    joined = case.recorded.joined
    call = joined.call if joined is not None else case.recorded.unfinished
    if call is None:
        return None
    if joined is not None and len(joined.group.members) == 1:
        return _never_ended(case, joined)
    on_host = joined is not None and joined.on_host and not _all_on_gpus(case)  # gloo waits for devices as well
    spinning = () if on_host else _spinning(case)
    if spinning:
        return _spins(case, spinning, call)
    members = tuple(sorted(joined.group.waiting)) if joined is not None else case.waiting
    why = "the network is stuck or slow" if on_host else "a device or the network is stuck"
    return _verdict(
        case,
        "hang_unknown" if on_host else "hang_device",
        (),
        f"{case.who(members)} called {collective_text(call)}, and it does not end: {why}.",
        undecidable=True,
        suspects=members,
        collective=call,
        place=(joined.group, joined.sequence) if joined is not None else None,
        evidence=_no_stacks(case),
    )


def _never_ended(case: Case, joined: Joined) -> Verdict:
    """The only rank of a group waits in a call of it."""
    rank = joined.rank
    reason = f"called {collective_text(joined.call)}, and its device never finished it"
    return _verdict(
        case,
        "hang_unknown" if joined.on_host else "hang_device",
        [rank],
        f"{case.who([rank])} {reason}.",
        culprits=(Culprit(rank=rank, reason=reason, at=case.doings[rank].at),),
        collective=joined.call,
        place=(joined.group, joined.sequence),
    )


def _spins(case: Case, guilty: Sequence[int], call: WaitingIn) -> Verdict:
    owner = "its device has" if len(guilty) == 1 else "their devices have"
    what = f"not finished what comes before {collective_text(call)}, which all ranks called"
    others = "the others sleep" if len(case.waiting) > 2 else "the other rank sleeps"
    evidence = tuple(
        f"Rank {rank} uses {case.ranks[rank].cpu_share or 0.0:.0%} of a core waiting; {others}."
        for rank in guilty[:SHOWN]
    )
    title = f"{case.who(guilty)}: {owner} {what}."
    return _verdict(case, "hang_device", guilty, title, collective=call, evidence=evidence)


def _all_on_gpus(case: Case) -> bool:
    return all(
        doing.state == "collective" and case.ranks[rank].device.startswith("cuda")
        for rank, doing in case.doings.items()
    )


def _spinning(case: Case) -> Sequence[int]:
    """The ranks with a stuck device: a host thread may spin while it waits for its device, but sleeps for peers."""
    shares = {rank: case.ranks[rank].cpu_share or 0.0 for rank in case.waiting}
    spinning = [rank for rank, share in shares.items() if share >= SPINNING_SHARE]
    unclear = any(SLEEPING_SHARE < share < SPINNING_SHARE for share in shares.values())
    if unclear or case.recorded.queues or len(spinning) == len(shares):  # on NCCL, waiting for peers spins as well
        return ()
    return spinning


def _unknown(case: Case) -> Verdict:
    silent = [rank for rank, doing in case.doings.items() if doing.state == "unknown"]
    parts = []
    if case.waiting:
        verb = "waits" if len(case.waiting) == 1 else "wait"
        parts.append(f"{ranks_text(case.waiting)} {verb} in {collective_text(case.shared(case.waiting))}")
    if silent and not case.evidence.from_files:
        parts.append(f"what {ranks_text(silent)} {'does' if len(silent) == 1 else 'do'} is unknown")
    text = f": {listed(parts)}" if parts else ""
    title = f"The job hangs for an unknown reason{text}."
    evidence = _no_stacks(case)
    return _verdict(case, "hang_unknown", (), title, undecidable=True, suspects=case.waiting, evidence=evidence)


def _no_stacks(case: Case) -> tuple[str, ...]:
    mute = [rank for rank, evidence in case.ranks.items() if not evidence.threads and evidence.alive]
    return (f"No stack trace is available for {ranks_text(mute)}.",) if mute and not case.evidence.from_files else ()


# -- judge ------------------------------------------------------------------------------------------------------------

CERTAIN = (
    Rule(_gone, evidence="both", cause="a rank has failed on its own, or its process is gone"),
    Rule(_frozen, evidence="live", cause="a process is stopped, or a C call holds its GIL"),
)
"""Causes that no work on other ranks excuses."""
RULES = (
    Rule(_elsewhere, evidence="both", cause="a rank is seen outside of any collective"),
    Rule(_lagging, evidence="recorders", cause="a device has not ended what has ended on its peers"),
    Rule(_diverged, evidence="recorders", cause="a rank made another call than the others, or skipped one"),
    Rule(_no_dump, evidence="files", cause="all wait for ranks that left no dump"),
    Rule(_behind, evidence="live, NCCL", cause="a device has not started what others have"),
    Rule(_circle, evidence="both", cause="ranks wait for each other"),
    Rule(_not_called, evidence="recorders", cause="a rank has not made the call that others wait in"),
    Rule(_unlike_in_rings, evidence="live", cause="the rings show different calls of one group"),
    Rule(_other_hosts, evidence="live", cause="all wait for ranks on other hosts"),
    Rule(_on_device, evidence="live", cause="hosts wait for their devices"),
    Rule(_all_joined, evidence="recorders", cause="all made the call, and it does not end"),
)
"""In order; the first that has an answer counts. A rank that is seen elsewhere comes before what recorders show: it is
certain, and calls that differ may be its consequence. The order of calls matters only if all ranks wait.
"""


def judge(evidence: Evidence, *, number: int, declared_wall_ns: int, stopped_wall_ns: int) -> HangRecord | NotAHang:
    """Judge a job whose ranks make no progress."""
    case = case_of(evidence)
    answer = at_rest(case) or _first(case, CERTAIN) or excuse_of(case) or _first(case, RULES) or _unknown(case)
    if isinstance(answer, NotAHang):
        return answer
    return HangRecord(
        number=number,
        host=evidence.host,
        kind=answer.kind,
        title=answer.title,
        declared_wall_ns=declared_wall_ns,
        stopped_wall_ns=stopped_wall_ns,
        threshold_s=evidence.threshold_s,
        step_s=evidence.step_s,
        culprits=answer.culprits,
        victims=answer.victims,
        undecidable=answer.undecidable,
        collective=answer.collective,
        cycle=answer.cycle,
        evidence=answer.evidence,
        ranks=tuple(_there(case, rank) for rank in case.ranks),
        stacks=_stacks(case),
        flight=_flight(case, answer),
    )


def judge_dumps(
    dumps: Sequence[Dump],
    *,
    stacks: Mapping[int, tuple[ThreadStack, ...]] | None = None,
    errors: Mapping[int, str] | None = None,
    logs: Mapping[int, RankLog] | None = None,
    world: int | None = None,
    unreadable: Collection[int] = (),
    problems: Sequence[str] = (),
) -> dict[str, Any]:
    """Judge the dumps of one job, in any order; return the document of ``stepscope flight --json``.

    ``unreadable``: ranks whose dump exists but cannot be read.
    """
    case = case_of(
        evidence_of_files(dumps, stacks=stacks or {}, errors=errors or {}, world=world, unreadable=unreadable)
    )
    answer = dumps_in_order(case) or _first(case, CERTAIN) or _first(case, RULES) or _unknown(case)
    return flight_document(case, answer, logs=logs or {}, problems=problems)


def _first(case: Case, rules: Sequence[Rule]) -> Verdict | None:
    return next((verdict for rule in rules if (verdict := rule.decide(case)) is not None), None)


def _flight(case: Case, verdict: Verdict) -> dict[str, Any]:
    """The document about the Flight Recorders, without what the record contains itself."""
    if not case.recorded.dumps:
        return {}
    document = encoded(flight_document(case, verdict))
    return {key: value for key, value in document.items() if key not in ("schema", "stacks")}


def _there(case: Case, number: int) -> RankThere:
    rank, doing = case.ranks[number], case.doings[number]
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
        workers=tuple(_worker(case, number)),
        host=case.evidence.hosts.get(number, ""),
    )


def _worker(case: Case, number: int) -> list[dict[str, Any]]:
    lines = case.evidence.source_lines
    rows = []
    for worker in case.ranks[number].workers:
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


def _stacks(case: Case) -> tuple[StackGroup, ...]:
    own = {number: rank.threads for number, rank in case.ranks.items() if rank.threads}
    groups = list(group_stacks(own))
    workers: dict[tuple[Any, ...], set[int]] = {}
    for number, rank in case.ranks.items():
        for worker in rank.workers:
            if worker.threads:
                workers.setdefault(worker.threads, set()).add(number)
    groups += [
        StackGroup(ranks=tuple(sorted(ranks)), threads=threads, workers_of=True) for threads, ranks in workers.items()
    ]
    return tuple(groups)
