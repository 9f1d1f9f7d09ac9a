"""Traces and meta files from outside: read right, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.errors import TraceError
from stepscope.whatif.operations import JobShape, read_meta, read_trace
from stepscope.whatif.replay import analyze

Rows = list[dict[str, Any]]

WIDE = {"dp_rank": "BIGINT", "stage": "BIGINT", "rank": "BIGINT", "step": "BIGINT", "optype": "VARCHAR",
        "start_ts": "DOUBLE", "duration": "DOUBLE", "seq_id": "BIGINT", "mc": "DOUBLE", "gmc": "DOUBLE"}  # fmt: skip


def shape(**sizes: int) -> JobShape:
    return JobShape(trial_name="t", **{"dp_size": 2, "pp_size": 1, "tp_size": 1, "dsp_size": 1, "vpp_size": 1, **sizes})


def meta(tmp_path: Path, text: str) -> JobShape:
    (tmp_path / "meta.yaml").write_text(text)
    return read_meta(tmp_path / "meta.yaml")


def test_meta_in_flat_yaml_and_in_json(tmp_path: Path) -> None:
    wanted = JobShape(trial_name="AR", dp_size=4, pp_size=2, tp_size=1, dsp_size=1, vpp_size=3)
    text = "---\n# a job\ntrial_name: 'AR'  # its name\nrun_id: 0\n\ndp_size: 4\npp_size: 2 # stages\nvpp_size: 3\n"
    assert meta(tmp_path, f"{text}world_size: 8\n") == wanted
    assert meta(tmp_path, '{"trial_name": "AR", "dp_size": 4, "pp_size": 2, "vpp_size": 3, "world_size": 8}') == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs dp_size and pp_size"),
        ("dp_size: 4\n", "needs dp_size and pp_size"),
        ("dp_size: 4\npp_size:\n", "line 2: not of the form"),
        ("job:\n  dp_size: 4\n", "line 1: not of the form"),
        ("dp_size: 4\n  pp_size: 2\n", "line 2: not of the form"),
        ("dp_size: [4]\npp_size: 2\n", "line 1: not of the form"),
        ("- dp_size: 4\n", "line 1: not of the form"),
        ("dp_size: 4\ndp_size: 4\npp_size: 2\n", "line 2: dp_size appears twice"),
        ("dp_size: four\npp_size: 2\n", "dp_size must be a whole number"),
        ("dp_size: 0\npp_size: 2\n", "dp_size must be a whole number"),
        ("dp_size: 2.0\npp_size: 2\n", "dp_size must be a whole number"),
        ("dp_size: 4\npp_size: 2\nworld_size: 9\n", "world_size is 9, but .* is 8"),
        ("{", "is not valid JSON"),
        ('{"dp_size": true, "pp_size": 2}', "dp_size must be a whole number"),
        ("# " + "x" * 70_000, "too large"),
    ],
)
def test_meta_that_says_too_little_or_too_much(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        meta(tmp_path, text)


def test_meta_that_is_no_file_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_meta(tmp_path / "none.yaml")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_meta(tmp_path)
    (tmp_path / "meta.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="is not text"):
        read_meta(tmp_path / "meta.yaml")


def test_arrays(files: Any, two_lanes: Rows) -> None:
    rows = [{**row, "step": step, "start_ts": row["start_ts"] + step} for step in (9, 3) for row in reversed(two_lanes)]
    trace = read_trace(files.write(rows).trace, shape())
    assert (trace.steps, trace.lanes, trace.stages) == ((3, 9), (0, 1), 1)
    assert trace.ranks == {(0, 0): 0, (1, 0): 1}
    assert trace.start_s.shape == (5, 2, 2)
    at = [operation.kind for operation in trace.operations].index("backward-compute")
    assert trace.duration_s[at].tolist() == [[4, 8], [4, 8]]
    assert trace.start_s[at].tolist() == [[3 + 3, 5 + 3], [3 + 9, 5 + 9]]
    assert (trace.operations[at].start_s, trace.operations[at].end_s) == (6, 10)
    assert trace.notes == ()


def test_steps_that_are_not_whole_are_left_out(files: Any, two_lanes: Rows) -> None:
    rows = [{**row, "step": step} for step in range(5) for row in two_lanes]
    lacking = next(row for row in rows if row["step"] == 0 and row["optype"] == "optimizer")
    more = {**rows[-1], "step": 3, "seq_id": 1}
    trace = read_trace(files.write([row for row in [*rows, more] if row is not lacking]).trace, shape())
    assert trace.steps == (1, 2, 4)
    assert trace.notes == ("2 of 5 steps are left out: they have missing or extra operations",)
    assert analyze(trace).slowdown == pytest.approx(15 / 12)


def test_what_does_not_fit_quite_is_noted(files: Any, two_lanes: Rows) -> None:
    rows = [*two_lanes, {**two_lanes[0], "optype": "tea"}, {**two_lanes[0], "optype": "coffee"}]
    trace = read_trace(files.write(rows).trace, shape(dp_size=4, vpp_size=2))
    assert trace.notes == (
        "2 operations of unknown kinds are left out: coffee, tea",
        "the trace holds 2 of the 4 data-parallel ranks of the job",
        "model chunks on a stage: 1 in the trace, 2 in the meta file",
    )


def test_chunks_may_be_missing(files: Any, two_stages: Rows) -> None:
    narrow = {name: kind for name, kind in WIDE.items() if name not in ("mc", "gmc")}
    without = analyze(read_trace(files.write(two_stages, narrow).trace, shape(dp_size=1, pp_size=2)))
    nothing = [{**row, "mc": None, "gmc": float("nan")} for row in two_stages]
    unset = analyze(read_trace(files.write(nothing, WIDE).trace, shape(dp_size=1, pp_size=2)))
    assert without == unset == analyze(read_trace(files.write(two_stages).trace, shape(dp_size=1, pp_size=2)))


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration": -1.0}, r"duration is negative in 1 of 10 rows"),
        ({"duration": float("nan")}, r"duration is not a number in 1 of 10 rows"),
        ({"start_ts": float("inf")}, r"start_ts is not a number in 1 of 10 rows"),
        ({"start_ts": None}, r"start_ts is missing in 1 of 10 rows"),
        ({"optype": None}, r"optype is missing in 1 of 10 rows"),
        ({"step": None}, r"step is missing in 1 of 10 rows"),
        ({"dp_rank": -1}, r"dp_rank is negative in 1 of 10 rows"),
        ({"dp_rank": 2}, r"does not fit the meta file: there is a data-parallel rank 2; dp_size is 2"),
        ({"stage": 1}, r"does not fit the meta file: 2 pipeline stages, the last is number 1; pp_size is 1"),
        ({"rank": 1}, r"must map to exactly one rank"),
        ({"rank": 7}, r"must map to exactly one rank"),
        ({"seq_id": 1}, r"no step has the same operations on all data-parallel ranks"),
        ({"optype": "forward-compute"}, r"step 0, rank 0: forward-compute number 0 appears 2 times"),
    ],
)
def test_one_wrong_value(files: Any, two_lanes: Rows, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(files.write([{**two_lanes[0], **change}, *two_lanes[1:]], WIDE).trace, shape())


def test_a_stage_that_some_ranks_lack(files: Any, two_stages: Rows) -> None:
    rows = [*two_stages, *({**row, "dp_rank": 1, "rank": 50} for row in two_stages if row["stage"] == 0)]
    with pytest.raises(TraceError, match="some data-parallel ranks lack a pipeline stage"):
        read_trace(files.write(rows).trace, shape(pp_size=2))


def test_steps_with_nothing_in_common(files: Any, two_lanes: Rows) -> None:
    rows = [{**two_lanes[0], "step": step, "seq_id": step} for step in range(40)]
    with pytest.raises(TraceError, match="too little in common"):
        read_trace(files.write(rows, WIDE).trace, shape(dp_size=1))


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [
        ("step", None, "is not an operation trace: it has no column step"),
        ("optype", None, "it has no column optype"),
        ("stage", "VARCHAR", r"column stage has the wrong type \(VARCHAR\)"),
        ("step", "DOUBLE", r"column step has the wrong type \(DOUBLE\)"),
        ("duration", "BOOLEAN", r"column duration has the wrong type \(BOOLEAN\)"),
        ("mc", "VARCHAR", r"column mc has the wrong type \(VARCHAR\)"),
        ("optype", "BLOB", r"column optype has the wrong type \(BLOB\)"),
    ],
)
def test_wrong_columns(files: Any, column: str, kind: str | None, message: str) -> None:
    types = {**WIDE, column: kind} if kind else {name: value for name, value in WIDE.items() if name != column}
    with pytest.raises(TraceError, match=message):
        read_trace(files.write([], types).trace, shape())


def test_no_table_at_all(files: Any, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(files.trace, shape())
    with pytest.raises(TraceError, match="is not a file"):
        read_trace(tmp_path, shape())
    with pytest.raises(TraceError, match="is empty: no operation in it"):
        read_trace(files.write([]).trace, shape())
    unknown = {**dict.fromkeys(WIDE, 0), "optype": "tea"}
    with pytest.raises(TraceError, match="contains no operation of a known kind"):
        read_trace(files.write([unknown], WIDE).trace, shape())


def test_a_name_with_quotes_is_a_name(files: Any, two_lanes: Rows, tmp_path: Path) -> None:
    odd = tmp_path / "it's; *.parquet"
    files.write(two_lanes).trace.rename(odd)
    assert read_trace(odd, shape()).steps == (0,)


SHARED = settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])


@SHARED
@given(st.binary(max_size=300), st.booleans(), st.integers(0, 10**6))
def test_garbage_is_refused(files: Any, two_lanes: Rows, noise: bytes, whole: bool, at: int) -> None:
    """Noise alone, or written over a place of a real file: a result or a TraceError, nothing else."""
    data = files.write(two_lanes).trace.read_bytes() if whole else b"PAR1PAR1"
    at %= len(data)
    files.trace.write_bytes(data[:at] + noise + data[at + len(noise) :])
    try:
        analyze(read_trace(files.trace, shape()))
    except TraceError as error:
        assert "\n" not in str(error)


VALUES = st.one_of(st.integers(-2, 3), st.sampled_from([2**31, 2**62]), st.none())
NUMBERS = st.one_of(st.floats(), st.floats(0, 10), st.integers(0, 5), st.none())
KINDS = st.sampled_from(
    ["forward-compute", "backward-compute", "forward-send", "forward-recv", "optimizer", "params-all-gather", "x"]
)


@SHARED
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                name: (KINDS if name == "optype" else NUMBERS if kind == "DOUBLE" else VALUES)
                for name, kind in WIDE.items()
            }
        ),
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_tables_of_anything(files: Any, rows: Rows, size: int) -> None:
    try:
        found = analyze(read_trace(files.write(rows, WIDE).trace, shape(dp_size=size, pp_size=size)))
    except TraceError as error:
        assert "\n" not in str(error)
    else:
        assert found.slowdown > 0


@SHARED
@given(st.text(max_size=200))
def test_meta_of_anything(tmp_path: Path, text: str) -> None:
    (tmp_path / "meta.yaml").write_text(text, encoding="utf-8", errors="replace")
    try:
        read_meta(tmp_path / "meta.yaml")
    except TraceError as error:
        assert "\n" not in str(error)
