"""Advice as a table: the first row that fits the facts, with the facts filled in."""

from __future__ import annotations

from stepscope.judge.advice import advice_for, say

TABLE = (
    say("Ask {host}.", "Then {phase!r}.", host=True, phase=("input", None)),
    say("{count} of them.", count=3),
    say("Nobody knows.", host=False),
)


def test_the_first_row_that_fits_is_given_with_its_facts() -> None:
    assert advice_for(TABLE, host="a {b}", phase=None, count=3) == ("Ask a {b}.", "Then None.")
    assert advice_for(TABLE, host="a", phase="other", count=3) == ("3 of them.",)
    assert advice_for(TABLE, host="", phase="input", count=0) == ("Nobody knows.",)
    assert advice_for(TABLE, host="a", phase="other", count=0) == ()
