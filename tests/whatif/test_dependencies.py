"""The order of operations: schedules made by hand, and what holds for any lengths."""

from __future__ import annotations

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import TraceError
from stepscope.whatif.operations import Operation
from stepscope.whatif.replay import end_times, in_order


def op(kind: str, start: float, end: float, *, stage: int = 0, sequence: int = 0, chunk: int = 0) -> Operation:
    return Operation(
        kind=kind, sequence=sequence, stage=stage, chunk=chunk, model_chunk=-1, start_s=start, end_s=end
    )  # fmt: skip


def ends(operations: list[Operation], lengths: list[float], *, stages: int) -> list[float]:
    found = end_times(in_order(operations, stages=stages), np.array(lengths, dtype=float)[:, None, None])
    return [round(float(value), 6) for value in found[:, 0, 0]]


def interleaved(*, first_receive: bool) -> tuple[list[Operation], list[float]]:
    """Two stages with two chunks each, one micro-batch: 8 computing operations and 6 transfers, one after the other.

    Profilers note a send and a receive for each, also where the model begins and ends.
    """
    operations, lengths = [], []
    begin = 0.0
    for kind, places in (("forward", ((0, 0), (1, 0), (0, 1), (1, 1))), ("backward", ((1, 1), (0, 1), (1, 0), (0, 0)))):
        seen = [0, 0]
        for stage, chunk in places:
            number = seen[stage]
            seen[stage] += 1
            where = {"stage": stage, "sequence": number, "chunk": chunk}
            operations += [
                op(f"{kind}-recv", begin - 0.1, begin, **where),
                op(f"{kind}-compute", begin, begin + 1, **where),
                op(f"{kind}-send", begin + 1, begin + 1.1, **where),
            ]
            ends_here = (kind, stage, chunk) in (("forward", 0, 0), ("backward", 1, 1))
            begins_next = (kind, stage, chunk) in (("forward", 1, 1), ("backward", 0, 0))
            lengths += [0.0 if ends_here else 0.1, 1.0, 0.0 if begins_next else 0.1]
            begin += 1.1
    operations += [op("optimizer", begin, begin + 1, stage=stage) for stage in (0, 1)]
    lengths += [1.0, 1.0]
    if not first_receive:
        operations, lengths = operations[1:], lengths[1:]
    return operations, lengths


@pytest.mark.parametrize("first_receive", [True, False])
def test_interleaved_chunks(first_receive: bool) -> None:
    operations, lengths = interleaved(first_receive=first_receive)
    found = ends(operations, lengths, stages=2)
    last = {operation.stage: end for operation, end in zip(operations, found, strict=True)}
    assert last == {0: 8 + 0.6 + 1, 1: 7 + 0.5 + 1}, "stage 1 is spared the last backward and its transfer"


def test_gather_before_its_chunk_and_reduction_after_it() -> None:
    """Overlapped: the reduction of chunk 1 runs beside the backward of chunk 0, and the left-over ones end the step."""
    operations = [
        op("params-all-gather", 0, 1, sequence=0, chunk=0),
        op("params-all-gather", 1, 2, sequence=1, chunk=1),
        op("forward-compute", 1, 2, sequence=0, chunk=0),
        op("forward-compute", 2, 3, sequence=1, chunk=1),
        op("backward-compute", 3, 4, sequence=0, chunk=1),
        op("backward-compute", 4, 5, sequence=1, chunk=0),
        op("grads-reduce-scatter", 4, 5, sequence=0, chunk=1),
        op("grads-reduce-scatter", 5, 6, sequence=1, chunk=0),
        op("layernorm-grads-all-reduce", 6, 6.1),
        op("separate-grads-all-reduce", 6.1, 6.2),
        op("optimizer", 6.2, 7),
    ]
    found = ends(operations, [1, 5, 1, 1, 1, 1, 4, 1, 0.5, 0.25, 1], stages=1)
    assert found == [1, 6, 2, 7, 8, 9, 12, 13, 13.5, 13.75, 14.75]


def test_reductions_that_do_not_overlap_come_after_everything() -> None:
    operations = [
        op("forward-compute", 0, 1),
        op("backward-compute", 1, 2),
        op("gc", 2, 2),
        op("layernorm-grads-all-reduce", 2, 3),
        op("embedding-grads-all-reduce", 3, 4),
        op("grads-reduce-scatter", 4, 5),
        op("optimizer-clip-main-grad", 5, 6),
        op("optimizer", 6, 7),
    ]
    assert ends(operations, [1, 2, 3, 4, 5, 6, 7, 8], stages=1) == [1, 3, 6, 10, 15, 21, 28, 36]


def test_first_and_last_stage_share_the_embedding_and_all_clip_together() -> None:
    operations = [
        operation
        for stage in range(3)
        for operation in (
            op("forward-compute", 0, 1, stage=stage),
            op("embedding-grads-all-reduce", 1, 2, stage=stage),
            op("optimizer-clip-main-grad", 2, 3, stage=stage),
        )
        if stage != 1 or operation.kind != "embedding-grads-all-reduce"
    ]
    found = ends(operations, [1, 0.5, 0.1, 9, 0.2, 4, 0.25, 0.1], stages=3)
    assert found == [1, 4.5, 9.1, 9, 9.2, 4, 4.25, 9.1]


def test_sends_before_and_receives_after_all_computing_never_were(two_stages: list[dict[str, object]]) -> None:
    rows = [
        op(str(row["optype"]), float(row["start_ts"]), float(row["start_ts"]) + float(row["duration"]),  # type: ignore[arg-type]
           stage=int(row["stage"]))  # type: ignore[call-overload]
        for row in two_stages
    ]  # fmt: skip
    early = op("forward-send", 0.1, 0.2, sequence=7)
    late = op("forward-recv", 9, 9.5, stage=1, sequence=7)
    plain = ends(rows, [1, 0.5, 0.5, 2, 4, 0.5, 0.5, 2, 1, 1], stages=2)
    assert ends([*rows, early, late], [1, 0.5, 0.5, 2, 4, 0.5, 0.5, 2, 1, 1, 0, 0], stages=2)[:10] == plain


def test_the_first_backward_traffic_is_posted_two_forwards_before() -> None:
    """And one stream carries one thing after the other, needed or not."""
    operations = [
        *(op("forward-compute", number, number + 1, sequence=number) for number in range(3)),
        op("backward-compute", 5, 6),
        op("backward-recv", 2, 5),
        op("backward-recv", 7, 8, sequence=1),
        op("backward-send", 2, 5, stage=1),
        op("forward-compute", 0, 1, stage=1),
        op("backward-compute", 1, 2, stage=1),
    ]
    found = ends(operations, [10, 20, 30, 1, 2, 5, 2, 1, 1], stages=2)
    assert found[3] == 61, "after all forwards"
    assert found[4] == found[6] == 32, "the receive is posted at 30, the send was ready at 2"
    assert found[5] == 37, "the second receive after the first"


def test_a_schedule_with_holes_is_refused() -> None:
    middle = [op("forward-compute", number, number + 1, stage=stage, sequence=number) for number in range(3)
              for stage in range(3)]  # fmt: skip
    with pytest.raises(TraceError, match="stage 1 has 2 forward-send for 3"):
        in_order([*middle, *(op("forward-send", 1, 2, stage=1, sequence=n) for n in range(2))], stages=3)
    with pytest.raises(TraceError, match="stage 0 has 1 forward-send, the stage at their other end 0"):
        in_order(
            [op("forward-compute", 0, 1), op("forward-compute", 0, 1, stage=1), op("forward-send", 1, 2)], stages=2
        )


def test_a_circle_is_refused() -> None:
    """The gradients are reduced before the parameters that they come from are gathered."""
    operations = [
        op("grads-reduce-scatter", 0, 1),
        op("params-all-gather", 1, 2),
        op("forward-compute", 2, 3),
        op("backward-compute", 3, 4),
    ]
    with pytest.raises(TraceError, match="wait for each other in a circle"):
        in_order(operations, stages=1)


INTERLEAVED, _ = interleaved(first_receive=True)
ORDER = in_order(INTERLEAVED, stages=2)
LENGTHS = st.lists(st.floats(0, 1000), min_size=len(INTERLEAVED), max_size=len(INTERLEAVED))


@settings(max_examples=examples(50))
@given(lengths=LENGTHS, at=st.integers(0, len(INTERLEAVED) - 1), more=st.floats(0, 100))
def test_no_worker_is_quicker_than_its_own_work_and_slower_is_never_quicker(
    lengths: list[float], at: int, more: float
) -> None:
    length_s = np.array(lengths)[:, None, None]
    end_s = end_times(ORDER, length_s)
    for stage in (0, 1):
        own = [i for i, o in enumerate(INTERLEAVED) if o.stage == stage and "compute" in o.kind]
        assert end_s[own].max() >= length_s[own].sum() * (1 - 1e-9)
    longer = length_s.copy()
    longer[at] += more
    assert (end_times(ORDER, longer) >= end_s - 1e-9).all()
    np.testing.assert_allclose(end_times(ORDER, length_s * 3), end_s * 3)
