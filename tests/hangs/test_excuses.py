"""Slow is not stuck: what is no hang, how that can be told, and when patience ends."""

from __future__ import annotations

from typing import Any

import pytest
from hang_jobs import LOOP, SCRIPT, SLEEPING, Job, Stack, stack, worker

SAVING = stack(("torch/serialization.py", 967, "save"), ("train.py", 70, "keep"), LOOP)
SHARDED = stack(("torch/distributed/checkpoint/filesystem.py", 300, "write"), ("train.py", 70, "keep"), LOOP)
SAFETENSORS = stack(
    ("/venv/lib/python3.11/site-packages/safetensors/torch.py", 286, "save_file"), ("train.py", 70, "f"), LOOP
)
OWN_SAVE = stack(("io_helpers.py", 9, "upload"), ("train.py", 70, "save_model"), LOOP)
COMPILING = stack(
    ("/usr/lib/python3.11/subprocess.py", 1209, "communicate"),
    ("torch/_inductor/async_compile.py", 200, "wait"),
    ("torch/_dynamo/convert_frame.py", 700, "compile_inner"),
    ("train.py", 20, "step"),
    LOOP,
)
EVALUATING = stack(("torch/nn/modules/linear.py", 134, "forward"), ("train.py", 75, "evaluate"), LOOP)
COMPUTING = stack(("prepare.py", 12, "tokenize"), LOOP)
RUNNING: dict[str, Any] = {"cpu_share": 0.97, "process_state": "R"}
IN_LOADER = stack(("torch/utils/data/dataloader.py", 1275, "_try_get_data"), ("train.py", 30, "epoch"), LOOP)


@pytest.mark.parametrize("size", (1, 2, 64))
@pytest.mark.parametrize(
    ("threads", "fields", "what", "signs"),
    [
        (
            SAVING,
            {"phase": "checkpoint", "io_bytes_s": 5e7},
            "writes a checkpoint at train.py:70",
            "It reads and writes 50.0 MB/s.",
        ),
        (SHARDED, RUNNING, "writes a checkpoint at train.py:70", "It uses 97% of a core."),
        (SAFETENSORS, {"io_bytes_s": 2e6}, "writes a checkpoint at train.py:70", "It reads and writes 2.0 MB/s."),
        (OWN_SAVE, {"io_bytes_s": 2e6}, "writes a checkpoint at io_helpers.py:9", "It reads and writes 2.0 MB/s."),
        (
            COMPILING,
            {"workers": (worker(kind="compiler", name="/usr/bin/cc1plus -O3", cpu_share=0.9),)},
            "compiles at train.py:20",
            "A compiler that it started is running: /usr/bin/cc1plus -O3.",
        ),
        (EVALUATING, RUNNING, "evaluates at train.py:75", "It uses 97% of a core."),
        (
            SLEEPING,
            {"phase": "eval", **RUNNING},
            "evaluates at train.py:41 (time.sleep(999))",
            "It uses 97% of a core.",
        ),
        (COMPUTING, {"step": None, **RUNNING}, "prepares its first step at prepare.py:12", "It uses 97% of a core."),
        (
            COMPUTING,
            {"step": None, "io_bytes_s": 3e8},
            "prepares its first step at prepare.py:12",
            "It reads and writes 300.0 MB/s.",
        ),
    ],
)
def test_known_work_is_given_sixty_times_the_threshold(
    size: int, threads: Stack, fields: dict[str, Any], what: str, signs: str
) -> None:
    who = "The process" if size == 1 else "Rank 0"
    excuse = Job(ranks=size, silent_s=599.0).alone(0, threads, **fields).excuse()
    assert excuse.reason == f"{who} {what}."
    assert signs in excuse.evidence
    assert excuse.evidence[-1] == "It counts as a hang after 10 min without progress."
    assert excuse.check_again_s == 1.0
    assert Job(ranks=size, silent_s=601.0).alone(0, threads, **fields).hang().culprits[0].rank == 0


@pytest.mark.parametrize(
    ("threads", "fields"),
    [(SAVING, {"phase": "checkpoint"}), (EVALUATING, {}), (SLEEPING, {"phase": "eval"}), (COMPILING, {})],
)
def test_known_work_of_which_nothing_moves_is_given_twelve_times(threads: Stack, fields: dict[str, Any]) -> None:
    assert Job(silent_s=119.0).alone(0, threads, **fields).excuse().check_again_s == 1.0
    hang = Job(silent_s=121.0).alone(0, threads, **fields).hang()
    assert (hang.kind, hang.victims) == ("hang_missing_collective", (1, 2, 3))


@pytest.mark.parametrize(
    ("threads", "fields", "what"),
    [
        (COMPUTING, RUNNING, "computes at prepare.py:12"),
        (COMPUTING, {"io_bytes_s": 3e8}, "reads or writes files at prepare.py:12"),
        (
            IN_LOADER,
            {"workers": (worker(cpu_share=0.8),)},
            "waits for a batch that is still being prepared at train.py:30",
        ),
        (IN_LOADER, {"io_bytes_s": 3e8}, "waits for a batch that is still being prepared at train.py:30"),
        (IN_LOADER, {"step": None}, "waits for its first batch at train.py:30"),
        # On a machine with more to do than cores.
        (COMPUTING, {"cpu_share": 0.06, "process_state": "R"}, "computes at prepare.py:12"),
    ],
)
def test_plain_work_is_given_six_times(threads: Stack, fields: dict[str, Any], what: str) -> None:
    assert Job(silent_s=59.0).alone(0, threads, **fields).excuse().reason == f"Rank 0 {what}."
    assert Job(silent_s=61.0).alone(0, threads, **fields).hang().culprits[0].rank == 0


def test_a_stack_that_moves_with_a_processor_in_use_is_work() -> None:
    later = stack(("prepare.py", 13, "tokenize"), LOOP)
    job = Job().alone(0, COMPUTING, cpu_share=0.5)
    assert job.hang().kind == "hang_missing_collective"  # asleep, whatever threads of a library do
    excuse = job.at(0, threads_later=later).excuse()
    assert "Its stack changed between two checks." in excuse.evidence


def test_a_program_that_it_started_is_at_work() -> None:
    waiting = stack(("/usr/lib/python3.11/subprocess.py", 1209, "communicate"), ("train.py", 33, "tokenize"), LOOP)
    job = Job().alone(0, waiting, workers=(worker(kind="other", name="tokenize --all", cpu_share=0.9),))
    assert job.excuse().reason == "Rank 0 waits for a process that it started at train.py:33."
    assert job.excuse().evidence[0] == "Process 5001 (tokenize --all) uses 90% of a core."
    idle = Job().alone(0, waiting, workers=(worker(kind="other", cpu_share=0.0),))
    assert idle.hang().kind == "hang_missing_collective"


@pytest.mark.parametrize("kind", ["other", "dataloader"])  # a plain fork is taken for a worker of a DataLoader
def test_one_process_that_waits_for_an_idle_child_is_given_more_time(kind: str) -> None:
    """As with os.waitpid, of which no frame tells; in a job of several ranks the others wait, too."""
    waiting = stack(("train.py", 33, "in_a_child"), LOOP)
    child = (worker(kind=kind, name="python train.py", cpu_share=0.0),)
    job = Job(ranks=1, silent_s=29.0).alone(0, waiting, workers=child, wait_channel="do_wait", cpu_share=0.0)
    assert job.excuse().reason == "The process waits for a process that it started at train.py:33."
    assert job.excuse().evidence[0] == "Process 5001 (python train.py) has not ended."
    job = Job(ranks=1, silent_s=31.0).alone(0, waiting, workers=child, wait_channel="do_wait", cpu_share=0.0)
    assert job.hang().kind == "hang_host"
    job = Job(ranks=2, silent_s=29.0).alone(0, waiting, workers=child, wait_channel="do_wait", cpu_share=0.0)
    assert job.hang().kind == "hang_missing_collective"


def test_ranks_that_are_still_to_come_are_waited_for_before_the_first_step() -> None:
    job = Job(ranks=2, world_size=4).at(0, step=None).at(1, step=None)
    assert job.excuse().reason.startswith("Rank 0 waits for ranks that have not reported yet")
    assert Job(ranks=2, world_size=4, silent_s=121.0).at(0, step=None).at(1, step=None).hang().kind == "rank_lost"
    assert Job(ranks=2, world_size=4).hang().kind == "rank_lost"


def test_ranks_are_waited_for_by_a_process_of_which_no_stack_is_known() -> None:
    """Lightning's first process starts the others itself, and sleeps meanwhile."""
    asleep: dict[str, Any] = {"step": None, "cpu_share": 0.013, "wait_channel": "hrtimer_nanosleep", "groups": ()}
    job = Job(ranks=1, world_size=2, silent_s=11.0).alone(0, (), **asleep)
    assert job.excuse().reason == "Rank 0 waits for ranks that have not reported yet."
    assert Job(ranks=1, world_size=2, silent_s=121.0).alone(0, (), **asleep).hang().kind == "hang_unknown"
    known = Job(ranks=2, silent_s=11.0).alone(0, (), **asleep).alone(1, (), **asleep)
    assert known.hang().kind == "hang_unknown"


def test_a_process_that_goes_down_in_order_has_not_crashed() -> None:
    job = Job(ranks=2).alone(0, (), ended="exited in order").alone(1, (), ended="exited in order", process_state="Z")
    assert job.excuse().reason == "Every rank of this host has ended."


def test_a_process_that_is_stopped_at_its_exit_has_not_ended() -> None:
    job = Job(ranks=2).alone(0, (), alive=False, ended="exited in order")
    hang = job.alone(1, (), ended="exited in order", process_state="T").hang()
    assert (hang.kind, [culprit.rank for culprit in hang.culprits]) == ("hang_host", [1])
    assert "is stopped (SIGSTOP) while it exits" in hang.culprits[0].reason


def test_one_at_work_excuses_one_that_waits_for_its_file() -> None:
    job = Job().alone(0, SAVING, phase="checkpoint", io_bytes_s=5e7).alone(1)
    assert job.excuse().reason == "Rank 0 writes a checkpoint at train.py:70."


@pytest.mark.parametrize("state", ("T", "t"))
def test_nothing_excuses_a_stopped_process(state: str) -> None:
    assert Job().alone(0, SAVING, phase="checkpoint", io_bytes_s=5e7, process_state=state).hang().kind == "hang_host"


def test_nothing_excuses_a_dead_one() -> None:
    job = (
        Job().alone(0, SAVING, phase="checkpoint", io_bytes_s=5e7).alone(1, (), alive=False, ended="killed by SIGKILL")
    )
    assert job.hang().kind == "rank_crashed"


@pytest.mark.parametrize("threads", (COMPUTING, EVALUATING, IN_LOADER))
def test_a_gil_that_is_held_excuses_nothing(threads: Stack) -> None:
    assert Job().alone(0, threads, gil_held=True, **RUNNING).hang().kind == "hang_host"


def test_but_serializing_and_compiling_are_long_calls_of_c() -> None:
    assert Job().alone(0, SAVING, phase="checkpoint", gil_held=True, **RUNNING).excuse()
    assert Job().alone(0, COMPILING, gil_held=True, **RUNNING).excuse()
    assert Job().alone(0, COMPILING, gil_held=True).hang().kind == "hang_host"


def test_a_gil_that_was_held_at_one_look_only_is_at_work() -> None:
    later = stack(("prepare.py", 13, "tokenize"), LOOP)
    assert Job().alone(0, COMPUTING, gil_held=True, **RUNNING).at(0, threads_later=later).excuse()


def test_a_function_that_trains_and_evaluates_does_not_say_which() -> None:
    outer = stack(("train.py", 41, "next_batch"), ("train.py", 75, "train_and_evaluate"), LOOP)
    assert Job().alone(0, outer).hang().kind == "hang_missing_collective"


def test_forward_is_no_checkpoint_whatever_its_functions_are_called() -> None:
    outer = stack(("model.py", 9, "checkpoint_forward"), LOOP)
    assert Job().alone(0, outer, phase="forward").hang().kind == "hang_missing_collective"


def test_calls_of_what_was_compiled_long_ago_are_no_compilation() -> None:
    inside = stack(("train.py", 41, "next_batch"), ("torch/_dynamo/eval_frame.py", 600, "_fn"), LOOP)
    assert Job().alone(0, inside).hang().kind == "hang_missing_collective"


def test_who_waits_in_the_collective_of_a_checkpoint_waits() -> None:
    waiting = stack(
        ("torch/distributed/distributed_c10d.py", 3252, "gather_object"),
        ("torch/distributed/checkpoint/utils.py", 200, "reduce_scatter"),
        ("train.py", 70, "keep"),
        LOOP,
    )
    job = Job(ranks=2).alone(0).alone(1, waiting, phase="checkpoint")
    assert (job.hang().kind, job.hang().victims) == ("hang_missing_collective", (1,))


def test_it_is_looked_at_again_no_later_than_after_the_threshold() -> None:
    assert Job(silent_s=11.0).alone(0, COMPUTING, **RUNNING).excuse().check_again_s == 10.0
    assert Job(silent_s=55.0).alone(0, COMPUTING, **RUNNING).excuse().check_again_s == 5.0


def test_the_reason_is_the_same_at_every_look() -> None:
    lines = {(SCRIPT, 70): "torch.save(model, path)"}
    reasons = {
        Job(silent_s=seconds, lines=lines).alone(0, SAVING, io_bytes_s=seconds * 1e6).excuse().reason
        for seconds in (11.0, 21.0, 31.0)
    }
    assert reasons == {"Rank 0 writes a checkpoint at train.py:70 (torch.save(model, path))."}


def test_the_first_batch_may_take_its_time() -> None:
    everybody = Job(ranks=2, silent_s=59.0)
    for rank in range(2):
        everybody.alone(rank, IN_LOADER, step=None, workers=(worker(),))
    assert everybody.excuse().reason == "Rank 0 waits for its first batch at train.py:30."
    everybody.silent_s = 61.0
    assert everybody.hang().kind == "hang_input"


def test_a_process_that_wants_a_processor_and_hardly_gets_one_is_at_work() -> None:
    """As at the end of a script, when the interpreter clears up and gives no stacks any more."""
    job = Job(ranks=2)
    for rank in range(2):
        job.alone(rank, (), process_state="R", cpu_share=0.05)
    assert job.excuse().reason == "Rank 0 computes."
    job.at(0, process_state="S").at(1, process_state="S")
    assert job.hang().kind == "hang_unknown"


KERNEL = (
    ("/venv/lib/python3.11/site-packages/tornado/platform/asyncio.py", 203, "start"),
    ("/venv/lib/python3.11/site-packages/ipykernel/kernelapp.py", 768, "start"),
    ("/venv/lib/python3.11/site-packages/ipykernel_launcher.py", 18, "<module>"),
)
BETWEEN_CELLS = stack(("/usr/lib/python3.11/selectors.py", 468, "select"), *KERNEL)
IN_A_CELL = stack(
    ("/tmp/ipykernel_12324/322854956.py", 3, "<module>"),
    ("/venv/lib/python3.11/site-packages/IPython/core/interactiveshell.py", 3823, "run_code"),
    *KERNEL,
)
IN_A_TERMINAL = stack(
    ("/usr/lib/python3.11/selectors.py", 468, "select"),
    ("/venv/lib/python3.11/site-packages/IPython/terminal/interactiveshell.py", 900, "prompt_for_code"),
)


@pytest.mark.parametrize("threads", (BETWEEN_CELLS, IN_A_TERMINAL))
def test_a_notebook_whose_cells_are_done_rests_as_long_as_it_likes(threads: Stack) -> None:
    for silent_s in (11.0, 1e6):
        rests = Job(ranks=1, silent_s=silent_s).alone(0, threads).excuse()
        assert rests.reason == "The process waits for the user to run the next cell."
        assert rests.check_again_s == 60.0


def test_a_cell_that_stands_still_is_a_hang_as_anywhere() -> None:
    assert Job(ranks=1).alone(0, IN_A_CELL).hang().kind == "hang_host"


def test_a_kernel_that_the_others_wait_for_is_to_blame() -> None:
    found = Job(ranks=2).alone(1, BETWEEN_CELLS).hang()
    assert [culprit.rank for culprit in found.culprits] == [1]
    assert "it waits for the user to run the next cell" in found.culprits[0].reason
