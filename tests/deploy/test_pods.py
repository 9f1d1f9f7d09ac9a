"""Pods of ``deploy/kubernetes/examples/job.yaml``, with the commands, users and volumes that are written there."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from namespaces import Network, why_not
from pods import Pods

from stepscope.store.documents import read_nodes

PATIENCE_S = 150.0
EXAMPLES = Path(__file__).parents[2] / "deploy" / "kubernetes" / "examples"
SCRIPT = """
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
over = torch.zeros(1)
while not over:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} rank {dist.get_rank()} made a step", flush=True)
    over += float(dist.get_rank() == 0 and Path("/workspace/finish").exists())
    dist.all_reduce(over)
    time.sleep(0.05)
dist.destroy_process_group()
"""

# In place of torchrun, for ranks without torch: one per node, which is the last word.
TORCHRUN = """#!/bin/sh
for word; do script=$word; done
export RANK=$JOB_COMPLETION_INDEX WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
exec python "$script"
"""
WITHOUT_TORCH = """
import time
from pathlib import Path

import stepscope

while not Path("/workspace/finish").exists():
    with stepscope.step(), stepscope.phase("work"):
        time.sleep(0.02)
    print("made a step", flush=True)
"""

GET = """
import ssl, sys, urllib.request

url = f"https://{sys.argv[1]}:7070/api/v1/runs"
request = urllib.request.Request(url, headers={"Authorization": f"Bearer {sys.argv[2]}"})
print(urllib.request.urlopen(request, context=ssl._create_unverified_context(), timeout=60).read().decode())
"""


def until(what: Callable[[], Any], pods: Pods) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, pods.outputs()
        assert pods.pods[-1].process.poll() is None, pods.outputs()
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_pods_make_one_run_though_one_is_replaced(tmp_path: Path) -> None:
    """The second pod is evicted; its successor has another address. Names are not known when the pods start."""
    _, hub_job, job = yaml.safe_load_all((EXAMPLES / "job.yaml").read_text())
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "train.py").write_text(SCRIPT)
    with Network(4, names=["hub", "train-0", "train-1", "train-1"]) as hosts:
        pods = Pods(hosts, tmp_path, workspace=workspace, secrets={"key": "a key of these tests alone\n"})
        hub = pods.start(hub_job["spec"]["template"])
        first = pods.start(job["spec"]["template"], index=0)
        second = pods.start(job["spec"]["template"], index=1)
        until(lambda: "recording to" in second.output, pods)
        pods.publish()
        until(lambda: first.output.count("made a step") > 20 and second.output.count("made a step") > 20, pods)
        second.terminate()
        assert second.process.wait(PATIENCE_S) != 0
        third = pods.start(job["spec"]["template"], index=1)
        pods.publish()
        until(lambda: third.output.count("made a step") > 20, pods)
        (workspace / "finish").touch()
        assert [pod.process.wait(PATIENCE_S) for pod in (first, third, hub)] == [0, 0, 0], pods.outputs()
    runs = pods.claim("stepscope-runs")
    assert [path.name for path in runs.iterdir()] == ["train"], pods.outputs()
    summary = json.loads((runs / "train" / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("finished", 0), pods.outputs()
    assert [attempt["attempt"] for attempt in summary["attempts"]] == [0, 1]
    assert [(row["rank"], row["host"]) for row in summary["ranks"]] == [(0, "train-0"), (1, "train-1")]
    assert [(row["node"], row["host"]) for row in summary["nodes"]] == [
        (0, "hub"), (1, "train-0"), (2, "train-1"), (2, "train-1"),
    ]  # fmt: skip
    assert "attempt 1 rank" in first.output


@pytest.mark.soak
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_hub_pod_that_is_replaced_continues_the_run(tmp_path: Path) -> None:
    """Its machine dies, and its successor has another address. The page of all runs shows the whole run."""
    _, hub_job, job = yaml.safe_load_all((EXAMPLES / "job.yaml").read_text())
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "train.py").write_text(WITHOUT_TORCH)
    (workspace / "torchrun").write_text(TORCHRUN)
    (workspace / "torchrun").chmod(0o755)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    page_job, _ = yaml.safe_load_all((EXAMPLES.parent / "base" / "hub.yaml").read_text())
    secrets = {"key": "a key of these tests alone\n", "token": "of-these-tests-alone\n"}
    with Network(5, names=["hub", "train-0", "train-1", "hub", "stepscope"]) as hosts:
        pods = Pods(hosts, tmp_path, workspace=workspace, secrets=secrets)
        container["env"].append({"name": "PATH", "value": f"/workspace:{pods.path}"})
        runs = pods.claim("stepscope-runs")
        hub = pods.start(hub_job["spec"]["template"])
        others = [pods.start(job["spec"]["template"], index=index) for index in (0, 1)]
        until(lambda: "recording to" in others[1].output, pods)
        pods.publish()
        until(lambda: [node.rows > 0 for node in read_nodes(runs / "train") if node.node] == [True, True], pods)
        hub.kill()
        hub.process.wait(PATIENCE_S)
        until(lambda: all("cannot be reached" in pod.output for pod in others), pods)
        successor = pods.start(hub_job["spec"]["template"])
        pods.publish()
        until(lambda: "recording to" in successor.output, pods)
        (workspace / "finish").touch()
        assert [pod.process.wait(PATIENCE_S) for pod in (*others, successor)] == [0, 0, 0], pods.outputs()
        page = pods.start(page_job["spec"]["template"])
        until(lambda: "serving" in page.output, pods)
        listed = json.loads(hosts[0].run([sys.executable, "-c", GET, page.host.address, secrets["token"].strip()]))
        page.terminate()
        assert page.process.wait(PATIENCE_S) == 0, page.output
    assert [(run["name"], run["status"]) for run in listed["runs"]] == [("train", "finished")]
    assert "continuing the run train" in successor.output
    assert [path.name for path in runs.iterdir()] == ["train"], pods.outputs()
    summary = json.loads((runs / "train" / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("finished", 0), pods.outputs()
    made = [pod.output.count("made a step") for pod in others]
    assert [row["steps"] for row in summary["ranks"]] == made, pods.outputs()
    assert [node["status"] for node in summary["nodes"]] == ["finished", "finished", "finished"]
    assert "The hub died 1 time and was restarted; no data was lost." in summary["notices"]


def with_operator(trainjob: dict[str, Any], rank: int) -> dict[str, Any]:
    """The pod template that Kubeflow Trainer makes of a TrainJob: runtime, patches, and its variables for torchrun."""
    (job,) = trainjob["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    trainer = trainjob["spec"]["trainer"]
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29400",
    }
    environment = [*trainer["env"], *({"name": name, "value": value} for name, value in variables.items())]
    return {"spec": {**spec, "subdomain": "train", "containers": [
        {**container, "command": trainer["command"], "env": environment}
    ]}}  # fmt: skip


@pytest.mark.soak
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_pods_of_a_trainjob_make_one_run(tmp_path: Path) -> None:
    trainjob = yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text())
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "train.py").write_text(WITHOUT_TORCH)
    (workspace / "torchrun").write_text(TORCHRUN)
    (workspace / "torchrun").chmod(0o755)
    with Network(2, names=["train-node-0-0", "train-node-0-1"]) as hosts:
        pods = Pods(hosts, tmp_path, workspace=workspace, secrets={"key": "a key of these tests alone\n"})
        trainjob["spec"]["trainer"]["env"].append({"name": "PATH", "value": f"/workspace:{pods.path}"})
        started = [pods.start(with_operator(trainjob, rank), index=rank) for rank in (0, 1)]
        until(lambda: all("recording to" in pod.output for pod in started), pods)
        pods.publish()
        run = pods.claim("stepscope-runs") / "train"
        until(lambda: [node.rows > 0 for node in read_nodes(run) if node.node] == [True], pods)
        (workspace / "finish").touch()
        assert [pod.process.wait(PATIENCE_S) for pod in started] == [0, 0], pods.outputs()
    assert [path.name for path in run.parent.iterdir()] == ["train"], pods.outputs()
    summary = json.loads((run / "summary.json").read_text())
    made = [pod.output.count("made a step") for pod in started]
    assert [(row["host"], row["steps"]) for row in summary["ranks"]] == [
        ("train-node-0-0", made[0]), ("train-node-0-1", made[1]),
    ]  # fmt: skip
