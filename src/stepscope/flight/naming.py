"""Which rank a file is of.  Pure.

A dump seldom says; torch puts the rank into the file's name, and where in the name is up to the user.  What the groups
say comes first: a rank is a member of all groups in its own dump, and if only one rank is, that is it.  Then the number
in the name that differs from file to file, best after ``rank``, else the last; folders count where they differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import PurePath

from stepscope.flight.entries import Dump
from stepscope.flight.spelling import MAX_RANK

__all__ = ["rank_by_groups", "ranks_by_name"]

_NUMBER = re.compile(r"\d{1,9}")
_AFTER_RANK = re.compile(r"rank[^0-9a-z]{0,2}(\d{1,9})", re.IGNORECASE)
_SUFFIXES = re.compile(r"(?:\.(?:pkl|pickle|json|txt|dump|trace|bin|pt))+$", re.IGNORECASE)


def rank_by_groups(dump: Dump) -> int | None:
    common: set[int] | None = None
    for ranks in dump.members.values():
        common = set(ranks) if common is None else common & set(ranks)
    return common.pop() if common is not None and len(common) == 1 else None


def ranks_by_name(names: Sequence[str]) -> Mapping[str, int]:
    """The rank each name gives, for those that give one."""
    folders = [PurePath(name).parent.parts for name in names]
    shared = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False)))
    stems = {name: _SUFFIXES.sub("", "/".join(PurePath(name).parts[shared:])) for name in names}
    after = {name: _last(_AFTER_RANK.findall(stem)) for name, stem in stems.items()}
    if len(_distinct(after)) == len(names):
        return _distinct(after)
    fields = {name: _NUMBER.findall(stem) for name, stem in stems.items()}
    widest = max((len(found) for found in fields.values()), default=0)
    for place in range(1, widest + 1):
        chosen = {name: _last(found[-place:][:1] if len(found) >= place else ()) for name, found in fields.items()}
        distinct = _distinct(chosen)
        if len(distinct) == len(names):
            return distinct
    last = {name: after[name] if after[name] is not None else _last(found) for name, found in fields.items()}
    return {name: rank for name, rank in last.items() if rank is not None}


def _distinct(ranks: Mapping[str, int | None]) -> dict[str, int]:
    """One name per rank."""
    by_rank = {rank: name for name, rank in ranks.items() if rank is not None}
    return {name: rank for rank, name in by_rank.items()}


def _last(numbers: Sequence[str]) -> int | None:
    return int(numbers[-1]) if numbers and int(numbers[-1]) < MAX_RANK else None
