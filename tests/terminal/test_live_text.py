"""Text of strangers, made harmless and brought to a width."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from stepscope.terminal.drawing import columns, fit, plain, printed_lines, spark, wrapped


def test_what_a_terminal_would_obey_is_not_there() -> None:
    assert plain("a\x1b[31mb\x07\u202ec\nd\x9b1m") == "a?[31mb??c?d?1m"
    assert plain("[red]x[/red]") == "[red]x[/red]"


def test_cut_and_padded_by_cells() -> None:
    assert fit("abc", 5) == "abc  "
    assert fit("abcdef", 5) == "abcd…"
    assert fit("漢字漢字", 5) == "漢字…"
    assert fit("漢字漢字", 4) == "漢…" + " "
    assert fit("abc", 0) == ""


@given(st.text(), st.integers(0, 40))
def test_always_exactly_so_wide(text: str, width: int) -> None:
    assert cell_len(fit(text, width)) == width
    assert fit(text, width).isprintable()


@given(st.text(max_size=80), st.integers(1, 30), st.integers(1, 4))
def test_wrapped_lines_fit(text: str, width: int, most: int) -> None:
    lines = wrapped(text, width, most)
    assert len(lines) <= most
    assert all(cell_len(line) <= width for line in lines)


def test_the_last_line_says_that_there_is_more() -> None:
    assert wrapped("one two three four five", 9, 2) == ["one two", "three fo…"]
    assert wrapped("one two three", 20, 2) == ["one two three"]


def test_styles_are_ours_alone() -> None:
    line = columns([("[red]a", "bold"), ("\x1b[31mb", "")], 8)
    assert line.plain == "[red]a?…"
    assert [str(span.style) for span in line.spans] == ["bold"]


def test_what_was_printed_as_a_terminal_would_leave_it() -> None:
    data = b"old\n10%\r20%\r30%\n\x1b[1;31mred\x1b[0m\x1b]0;title\x07 x\ta\xff\nlast"
    assert printed_lines(data, 3) == ["30%", "red x   a�", "last"]
    assert printed_lines(b"", 3) == []
    assert printed_lines(b"a\n\n", 3) == ["a", ""]


@given(st.binary(max_size=200), st.integers(0, 5))
def test_any_bytes_are_lines(data: bytes, most: int) -> None:
    lines = printed_lines(data, most)
    assert len(lines) <= most
    assert all(line.isprintable() for line in lines)


def test_the_shape_of_the_newest_values() -> None:
    assert spark([1, 2, 3], 10) == "▁▅█"
    assert spark(range(100), 3) == "▁▂▂"  # what differs little looks alike
    assert spark([5.0] * 4, 10) == "▁▁▁▁"
    assert spark([1.0] * 99 + [2.0] * 99 + [1000.0], 200).count("█") == 100  # one that is odd does not flatten the rest
    assert spark([], 5) == spark([1], 0) == ""
    assert spark([0, 0], 5) == "▁▁"
