"""The GPU matrix's own parts, and one cheap case of it on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gpu import __main__ as command
from gpu.cases import CASES, Case
from gpu.compare import added_lines, compare, losses_of, steps_of, why_broken
from gpu.runner import JOBS, Outcome, Recorded, run_case

CASE = Case(name="some/case", script="plain.py")


def outcome(*, steps: int | None = None, **more: object) -> Outcome:
    """A run of two steps; ``steps``: what Stepscope counted."""
    whole = Outcome(
        command=["python", "job.py"],
        code=0,
        seconds=10.0,
        stdout="loss 0 0 0x1.8p+0\nnoise\nloss 0 1 0x1.0p+0\nsteps 0 2\n",
        stderr="",
        left=[],
        recorded=None if steps is None else Recorded(steps={0: steps}, verdict="healthy"),
    )
    return replace(whole, **more)  # type: ignore[arg-type]


def test_losses_and_steps_are_read_by_rank() -> None:
    text = "loss 1 0 0x1p+0\nloss 0 0 0x1p+1\neval 1 3 nan\nsteps 1 5\nsteps 0 4\nlosses 9\n"
    assert losses_of(text) == {1: [("loss 0", "0x1p+0"), ("eval 3", "nan")], 0: [("loss 0", "0x1p+1")]}
    assert steps_of(text) == {1: 5, 0: 4}


def test_runs_that_are_alike_pass() -> None:
    found = compare(CASE, outcome(), outcome(steps=2, stderr="stepscope: the hub is gone\n"))
    assert (found.result, found.losses, found.differences) == ("ok", 2, [])
    assert found.own_lines == ["stepscope: the hub is gone"]


@pytest.mark.parametrize(
    ("recorded", "difference"),
    [
        (outcome(steps=2, code=1), "exit code 1 instead of 0"),
        (outcome(steps=1), "rank 0 made 2 steps, Stepscope has 1"),
        (outcome(steps=3), "rank 0 made 2 steps, Stepscope has 3"),
        (outcome(steps=2, stdout="loss 0 0 0x1.8p+0\nsteps 0 2\n"), "rank 0 reports 1 losses instead of 2"),
        (
            outcome(steps=2, stdout="loss 0 0 0x1.8p+0\nloss 0 1 0x1.1p+0\nsteps 0 2\n"),
            "rank 0, loss 1: 1.0625 instead of 1.0",
        ),
        (outcome(steps=2, stderr="UserWarning: lazy\n"), "1 lines added to standard error"),
        (
            outcome(steps=2, stdout=f"{outcome().stdout}stepscope: recording\n"),
            "1 lines added to standard output",
        ),
        (outcome(steps=2, left=["7 running python"]), "processes left behind: 7 running python"),
        (outcome(steps=2, seconds=31.0), "took 31 s instead of 10 s"),
        (outcome(recorded=Recorded(problem="no summary: FileNotFoundError")), "no summary: FileNotFoundError"),
        (
            outcome(recorded=Recorded(steps={0: 2}, hook_failures=3)),
            "3 failures inside our hooks",
        ),
    ],
)
def test_each_difference_is_one_sentence(recorded: Outcome, difference: str) -> None:
    found = compare(CASE, outcome(), recorded)
    assert (found.result, found.differences) == ("DIFFERS", [difference])


def test_a_run_that_never_ends_differs_and_says_what_was_running() -> None:
    found = compare(CASE, outcome(), outcome(steps=2, code=None, left=["7 running python"]))
    assert found.differences == ["the recorded run did not end within 120 s", "7 running python"]


def test_a_case_may_allow_steps() -> None:
    case = replace(CASE, extra_steps=4)
    assert compare(case, outcome(), outcome(steps=6)).result == "ok"
    assert compare(case, outcome(), outcome(steps=7)).result == "DIFFERS"


def test_a_line_of_one_rank_may_begin_behind_text_of_another() -> None:
    """On the H200 a bare run of two ranks had 167 of 168 losses: one began behind a progress bar."""
    printed = "loss 0 1 0x1.8p+0\nWriting model shards: 100%loss 1 1 0x1.1p+0\n{'loss': 3.1}steps 1 40\nsteps 0 40\n"
    assert losses_of(printed) == {0: [("loss 1", "0x1.8p+0")], 1: [("loss 1", "0x1.1p+0")]}
    assert steps_of(printed) == {0: 40, 1: 40}


def test_losses_that_change_by_themselves_are_not_blamed_on_us() -> None:
    other = "loss 0 0 0x1.8p+0\nloss 0 1 0x1.1p+0\nsteps 0 2\n"
    recorded = outcome(steps=2, stdout=other)
    found = compare(CASE, outcome(), recorded, [outcome(), outcome(stdout=other)])
    assert (found.result, found.unstable) == ("unclear", "1 of 2 other bare runs give different losses")
    found = compare(CASE, outcome(), recorded, [outcome(), outcome()])
    assert (found.result, found.unstable) == ("DIFFERS", "")


def test_a_job_that_was_cut_is_compared_as_far_as_both_got() -> None:
    case = replace(CASE, cut=True, exit_codes=(137,))
    short = outcome(steps=2, code=137, stdout="loss 0 0 0x1.8p+0\nsteps 0 2\n")
    assert compare(case, outcome(code=137), short).result == "ok"
    early = outcome(steps=0, code=137, stdout="")
    assert compare(case, outcome(code=137), early).differences == ["the job counts no steps instead of 2"]


@pytest.mark.parametrize(
    ("bare", "why"),
    [
        (outcome(code=1), "the bare run exits with 1, expected 0"),
        (outcome(code=None), "the bare run did not end within 120 s"),
        (outcome(stdout="steps 0 2\n"), "the bare run reports no loss"),
        (outcome(stdout="loss 0 0 0x1p+0\n"), "the bare run does not report the steps of every rank"),
    ],
)
def test_a_bare_run_that_is_not_what_was_meant_is_no_pass(bare: Outcome, why: str) -> None:
    assert why_broken(CASE, bare) == why


def test_added_lines_do_not_depend_on_numbers_paths_or_times() -> None:
    bare = "[rank0]:[W1116 14:00:09.923 reducer.cpp:1529] Warning: slow (12.5 MiB)\n/a/b/lib.py:3: UserWarning: old\n"
    repeated = "[rank1]:[W1117 09:10:11.1 reducer.cpp:1529] Warning: slow (3 GiB)\n/c/lib.py:4: UserWarning: old\n"
    assert added_lines(bare, f"{repeated}stepscope: hello\n\n 50%|██   | 1/2\nnew 3\nnew 3\n") == ["new 3"]


def test_frames_of_tracebacks_count_only_where_a_job_reaches_its_end() -> None:
    bare = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n    ^^^\nValueError: 3\n'
    ours = 'Traceback (most recent call last):\n  File "b.py", line 9, in wrapped\n    call()\nValueError: 4\n'
    assert added_lines(bare, ours, cut=True) == []
    assert len(added_lines(bare, ours)) == 2


def test_of_ranks_that_fail_only_the_exceptions_are_compared() -> None:
    bare = "[rank1]: ValueError: 3\n"
    assert added_lines(bare, "W1116 Sending closing signal\n[rank0]: ValueError: 4\n", cut=True, ranks=2) == []
    ours = "[rank0]: torch.distributed.DistBackendError: NCCL\n"
    assert added_lines(bare, ours, cut=True, ranks=2) == [ours.strip()]


def test_cases_have_names_of_their_own_scripts_that_exist_and_reasons() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.script for case in CASES if not (JOBS / case.script).is_file()} == set()
    assert [case.name for case in CASES if case.extra_steps and not case.reason] == []


def test_what_cannot_run_here_is_skipped_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cpu", "--only", "graphs/whole"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-2].split(maxsplit=2) == ["graphs/whole", "1", "not run: no GPU: CUDA graphs"]
    assert out[-1] == "0 passed, 0 failed, 1 skipped"


def test_missing_packages_are_named_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "NEEDED", ("json", "no_such_package"))
    assert command.main(["--device", "cpu"]) == 2
    assert "cannot import no_such_package;" in capsys.readouterr().err


def test_a_job_that_never_ends_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    case = replace(CASE, script=str(script), timeout_s=2.0)
    found = run_case(case, device="cpu", folder=tmp_path / "run", recorded=False)
    assert found.code is None
    assert sorted("job.py" in each for each in found.left) == [False, True]


@pytest.mark.soak  # near: tests/launch/test_forks.py and test_unnoticed.py
@pytest.mark.ranks
def test_a_job_with_forked_workers_behaves_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "result.json"
    code = command.main(["--device", "cpu", "--only", "plain/eval,endings/ctrl_c", "--jobs", "2", "--json", str(saved)])
    assert code == 0, capsys.readouterr().out
    document = json.loads(saved.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert document["counts"] == {"passed": 2, "failed": 0, "skipped": 0, "unclear": 0}
    assert (rows["plain/eval"]["losses"], rows["plain/eval"]["our_steps"]) == (51, "48")
    assert (rows["endings/ctrl_c"]["bare_code"], rows["endings/ctrl_c"]["our_code"]) == (130, 130)


def test_who_else_uses_the_gpu_is_no_difference() -> None:
    message = "torch.OutOfMemoryError: CUDA out of memory. {}Of the allocated memory 1.0 MiB is allocated by PyTorch."
    others = "Process 7 has 1.08 GiB memory in use. Process 8 has 796.00 MiB memory in use. "
    assert added_lines(message.format(others), message.format("Process 9 has 2.00 GiB memory in use. ")) == []
    assert added_lines(message.format(others), message.format(others).replace("CUDA", "HIP")) != []
