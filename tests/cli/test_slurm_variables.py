"""What Slurm's variables say, and what is made of node lists, whatever they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.cli.launch.command import SlurmStep, first_host, hosts_of, rank_variables, slurm_step, tasks_by_node

# As a real `srun -N 2 --ntasks-per-node 2` sets them for its last task.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_NNODES": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x8)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
}


def test_a_task_of_a_step() -> None:
    step = slurm_step({**STEP, "SLURM_RESTART_COUNT": "2"})
    assert step == SlurmStep(
        job=4711, step=3, restarts=2, nodes=2, node=1, tasks=4, task=3, tasks_here=2, task_here=1, first_host="gpu03"
    )
    assert (step.name, step.address) == ("slurm-4711.3", "gpu03")
    assert slurm_step({**STEP, "SLURM_STEP_ID": "0"}).name == "slurm-4711"
    assert (step.master_port, step.hub_port) == (10_090, 20_090)


def test_ranks_get_what_torch_asks_for_unless_it_is_set() -> None:
    step = slurm_step(STEP)
    expected = {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03", "MASTER_PORT": "10090",
    }  # fmt: skip
    assert rank_variables(step, STEP) == expected
    own = {"MASTER_ADDR": "ib0-gpu03", "MASTER_PORT": "12345"}
    assert rank_variables(step, own) == {name: expected[name] for name in expected if name not in own}


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": "4294967291"},  # the batch script
        {"SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {"SLURM_STEP_ID": ""},
        {"SLURM_PROCID": "4"},
        {"SLURM_LOCALID": "2"},
        {"SLURM_NODEID": "2"},
        {"SLURM_JOB_ID": "x"},
        {"SLURM_STEP_TASKS_PER_NODE": "2(y2)"},
    ],
    ids=str,
)
def test_what_is_no_task_of_a_step(change: dict[str, str]) -> None:
    assert slurm_step({**STEP, **change}) is None
    assert slurm_step({}) is None


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,2,1(x2)", [1, 2, 1, 1]), ("", []), ("2(x99999999)", []), ("2,", [])],
)
def test_tasks_by_node(text: str, counts: list[int]) -> None:
    assert tasks_by_node(text) == counts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu[01-04,7],login1", ["gpu01", "gpu02", "gpu03", "gpu04", "gpu7", "login1"]),
        ("localhost", ["localhost"]),
        ("a,b.example.org,c-1", ["a", "b.example.org", "c-1"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[1]-ib", ["n1-ib"]),
        ("rack[1-2]n[08-10]", ["rack1n08", "rack1n09", "rack1n10", "rack2n08", "rack2n09", "rack2n10"]),
        ("", []),
        ("n[", []),
        ("n[3-x]", []),
        ("n]2", []),
        ("n[2-1]", []),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert hosts_of(text) == hosts
    assert first_host(text) == (hosts[0] if hosts else "")


@given(st.lists(st.tuples(st.from_regex(r"\A[a-z]{1,5}\Z"), st.integers(0, 2000), st.integers(0, 30)), min_size=1))
def test_node_lists_that_were_written_are_read(spans: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{name}[{first:04}-{first + more:04}]" for name, first, more in spans)
    assert hosts_of(text) == [f"{name}{n:04}" for name, first, more in spans for n in range(first, first + more + 1)]


@given(st.text(alphabet="ab019[],-x()", max_size=40), st.text(alphabet="019(x),", max_size=30))
def test_nothing_that_stands_there_is_too_much(nodes: str, counts: str) -> None:
    assert all(isinstance(host, str) and host for host in hosts_of(nodes[:12]))
    assert isinstance(first_host(nodes), str)
    assert len(tasks_by_node(counts)) <= 1 << 20
