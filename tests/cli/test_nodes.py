"""Which node of how many this is: by our flags, by torchrun's words, by an operator's variables, by Slurm."""

from __future__ import annotations

import pytest

from stepscope.cli.launch.command import NodeOptions, Nodes, SlurmStep, find_nodes, split_endpoint, starts_ranks
from stepscope.errors import UsageError

STEP = SlurmStep(
    job=77, step=0, restarts=0, nodes=4, node=2, tasks=4, task=2, tasks_here=1, task_here=0, first_host="gpu01"
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py --nnodes 4 --node-rank 1", Nodes()),
        ("torchrun --nproc-per-node 8 train.py", Nodes()),
        ("torchrun --standalone --nproc_per_node=8 train.py --nnodes 2", Nodes()),
        (
            "torchrun --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 train.py",
            Nodes(count=2, least=2, rank=1, address="10.0.0.1"),
        ),
        (
            "torchrun --nnodes=2 --node_rank=1 --master_addr=head --nproc_per_node=8 train.py --node_rank=0",
            Nodes(count=2, least=2, rank=1, address="head"),
        ),
        ("torchrun --nnodes 2 --master_addr head train.py", Nodes(count=2, least=2, rank=0, address="head")),
        (
            "python -m torch.distributed.run --nnodes 3 --node_rank 2 --rdzv_endpoint head:29400 -m pkg.train",
            Nodes(count=3, least=3, rank=2, address="head"),
        ),
        (
            "python3.11 -u -m torch.distributed.launch --use_env --nnodes 2 --node_rank 0 train.py",
            Nodes(count=2, least=2, rank=0),
        ),
        (
            "torchrun --nnodes 1:4 --node-rank 3 --rdzv-id job7 --rdzv-backend c10d --rdzv-endpoint [fd00::1]:1 x.py",
            Nodes(count=4, least=1, rank=3, address="fd00::1", id="job7"),
        ),
        (
            "torchrun --no-python --nnodes 2 --node_rank 1 --master_addr head bash train.sh --nnodes 9",
            Nodes(count=2, least=2, rank=1, address="head"),
        ),
        (
            "/env/bin/accelerate launch --multi_gpu --num_machines 2 --machine_rank 1 --main_process_ip head train.py",
            Nodes(count=2, least=2, rank=1, address="head"),
        ),
        ("bash run.sh --nnodes 2 --node-rank 1", Nodes()),
    ],
)
def test_the_words_of_launchers(line: str, expected: Nodes) -> None:
    assert find_nodes(NodeOptions(), line.split(), {}, None) == expected


@pytest.mark.parametrize(
    ("flags", "line", "environ", "slurm", "expected"),
    [
        (NodeOptions(count="2", rank="1", address="head"), "train.py", {}, None, (2, 1, "head")),
        (NodeOptions(count="2", rank="0"), "train.py", {}, None, (2, 0, "")),
        (NodeOptions(count="2", rank="1"), "train.py", {"MASTER_ADDR": "head"}, None, (2, 1, "head")),
        # Ours go ahead of the launcher's; what we were not told is the launcher's to say.
        (
            NodeOptions(rank="1"),
            "torchrun --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint h x.py",
            {},
            None,
            (2, 1, "h"),
        ),
        (NodeOptions(address="hub"), "torchrun --nnodes 2 --node-rank 1 --master-addr h x.py", {}, None, (2, 1, "hub")),
        # An operator's variables are torchrun's; a script of one process does not read them.
        (
            NodeOptions(),
            "torchrun x.py",
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h"},
            None,
            (2, 1, "h"),
        ),
        (NodeOptions(), "x.py", {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h"}, None, (1, 0, "")),
        (NodeOptions(), "x.py", {}, STEP, (4, 2, "gpu01")),
        (NodeOptions(), "torchrun --nnodes 4 --rdzv_backend c10d --rdzv_endpoint h:1 x.py", {}, STEP, (4, 2, "h")),
        (NodeOptions(), "torchrun --nnodes 4 --rdzv_backend etcd --rdzv_endpoint e:1 x.py", {}, STEP, (4, 2, "gpu01")),
        # Two of the four nodes that Slurm gave: it cannot say which.
        (NodeOptions(count="2", rank="1", address="h"), "x.py", {}, STEP, (2, 1, "h")),
        (NodeOptions(count="1"), "x.py", {}, STEP, (1, 0, "")),
    ],
)
def test_who_is_asked_first(
    flags: NodeOptions, line: str, environ: dict[str, str], slurm: SlurmStep | None, expected: tuple[int, int, str]
) -> None:
    found = find_nodes(flags, line.split(), environ, slurm)
    assert (found.count, found.rank, found.address) == expected


def test_a_torchrun_of_our_own_hears_the_operator() -> None:
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "h:29400", "PET_RDZV_ID": "j"}
    found = find_nodes(NodeOptions(), ["x.py"], environ, None, torchrun=True)
    assert found == Nodes(count=2, least=2, rank=1, address="h", id="j")


@pytest.mark.parametrize(
    ("flags", "line", "message"),
    [
        (NodeOptions(count="0"), "x.py", "--nnodes 0: must be a number of nodes, or a minimum and a maximum (1:4)"),
        (NodeOptions(count="4:1"), "x.py", "--nnodes 4:1: must be a number of nodes, or a minimum and a maximum (1:4)"),
        (NodeOptions(count="two"), "x.py", "--nnodes two: must be a number of nodes, or a minimum and a maximum (1:4)"),
        (NodeOptions(count="2", rank="2"), "x.py", "--node-rank 2 of 2 nodes: must be from 0 to 1"),
        (NodeOptions(count="2", rank="-1"), "x.py", "--node-rank -1 of 2 nodes: must be from 0 to 1"),
        (NodeOptions(rank="1"), "x.py", "--node-rank 1 needs --nnodes, the number of nodes"),
        (
            NodeOptions(rank="first"),
            "torchrun x.py",
            "--node-rank first needs --nnodes, the number of nodes",
        ),
        (NodeOptions(count="2"), "x.py", "a job on 2 nodes needs --node-rank on every node (0 on the first)"),
        (NodeOptions(count="2", rank="1"), "x.py", "node 1 needs the address of node 0; specify --master-addr"),
        (
            NodeOptions(),
            "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h x.py",
            "a job on 2 nodes needs --node-rank",
        ),
    ],
)
def test_what_makes_no_sense(flags: NodeOptions, line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_nodes(flags, line.split(), {}, None)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [("head:29400", "head"), ("head", "head"), ("10.0.0.1:1", "10.0.0.1"), ("[::1]:29400", "::1"), ("[::1]", "::1"),
     ("fd00::1", "fd00::1"), ("", "")],
)  # fmt: skip
def test_the_host_of_an_endpoint(endpoint: str, host: str) -> None:
    assert split_endpoint(endpoint) == host


@pytest.mark.parametrize(
    ("line", "starts"),
    [("torchrun x.py", True), ("/env/bin/torchrun x.py", True), ("accelerate launch x.py", True), ("x.py", False),
     ("-m pkg.train", False), ("python -m torch.distributed.run x.py", True), ("python x.py", False), ("", False),
     ("-m torch.distributed.run x.py", True)],
)  # fmt: skip
def test_launchers_of_ranks(line: str, starts: bool) -> None:
    assert starts_ranks(line.split()) is starts
