"""What can be sent away: which words are gone, which stay, and that the same word becomes the same name."""

from __future__ import annotations

import pytest

from stepscope.records.redaction import Redactor

META = {
    "name": "night",
    "command": ["/opt/py/bin/python", "jobs/train.py", "--data=/data/Patients", "--cohort", "Ward-17b", "--lr", "0.1"],
    "cwd": "/Users/ada/secret project",
    "host": "gpu07.lab.example",
    "user": "ada",
    "executable": "/opt/py/bin/python",
    "environment": {"NCCL_SOCKET_IFNAME": "ib-Left4", "MASTER_ADDR": "head1"},
    "git": {"remote": "git@code.example:lab/model.git"},
}


@pytest.fixture
def redactor() -> Redactor:
    return Redactor(META, {"ranks": [{"host": "gpu07"}, {"host": "gpu08.lab.example"}]})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("gpu08 waits for gpu07.lab.example and head1", "host-3 waits for host-1 and host-2"),
        ("hangs/gpu07-0.json", "hangs/host-1-0.json"),
        ("ada's run of Ward-17b on ib-Left4", "user-1's run of [redacted] on [redacted]"),
        ('  File "/Users/ada/secret project/my code/a b.py", line 3', '  File "…/a b.py", line 3'),
        ("/Users/ada/secret project/train.py:12: slow", "…/train.py:12: slow"),
        ("in /Users/ada/secret project, /Users/ada and /data/x/", "in [path], [path] and [path]"),
        ("No such file: '/mnt/lake/q3.parquet'", "No such file: '…/q3.parquet'"),
        ("/opt/py/lib/python3.11/site-packages/torch/optim/adam.py:9", "…/site-packages/torch/optim/adam.py:9"),
        ("~/notes/plan.txt and file:///srv/a/b.py", "…/plan.txt and [address]"),
        ("10.1.2.3 to 10.1.2.4, 10.1.2.3:29500", "address-1 to address-2, address-1:29500"),
        ("fe80::1ff:fe23:4567:890a and ::1 and 127.0.0.1", "address-3 and ::1 and 127.0.0.1"),
        ("s3://bucket/x, https://u:p@hub.example/y git@code.example:lab/m.git", "[address] [address] [address]"),
        ("GPU-8f2a1c3e-0000-4000-8000-0123456789ab fell off its bus", "GPU-1 fell off its bus"),
    ],
)
def test_what_becomes_of_a_text(redactor: Redactor, text: str, shown: str) -> None:
    redactor.text("10.1.2.3 10.1.2.4")
    assert redactor.text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "Rank 2 is 29.0 ms slower than its peers in forward; 3/4 of 12:30:59, 1.5 GB/s, and/or.",
        "raise the limit of /dev/shm; see /proc/sys/kernel/perf_event_paranoid and GET /metrics",
        "torch 2.13.0+cpu, NCCL 2.21.5",
        "logs/rank-0.log",
        "",
    ],
)
def test_what_says_nothing_of_anybody_stays(redactor: Redactor, text: str) -> None:
    assert redactor.text(text) == text


def test_a_command_keeps_its_programs_and_the_names_of_its_options(redactor: Redactor) -> None:
    words = ["/opt/bin/torchrun", "--nproc-per-node", "2", "-m", "pkg.train", "jobs/train.py", "--cohort=x", "-v", "-3"]
    assert redactor.command(words) == [
        *["…/torchrun", "--nproc-per-node", "[redacted]", "-m", "pkg.train", "train.py"],
        *["--cohort=[redacted]", "-v", "[redacted]"],
    ]


def test_a_document_keeps_its_form(redactor: Redactor) -> None:
    document = {
        "context": META,
        "kind": "host",
        "by_host": {"gpu07": [1, None, 2.5]},
        "user": "ada",
        "ok": True,
        "files": ("logs/main.log",),
        "row": {"commit": "cb0c0fb7dfb7", "branch": "secret-project", "steps": 60},
    }
    assert redactor.document(document) == {
        "context": {
            "name": "night",
            "command": ["…/python", "train.py", "--data=[redacted]", "--cohort", "[redacted]", "--lr", "[redacted]"],
            "cwd": None,
            "host": "host-1",
            "user": "user-1",
            "executable": None,
            "environment": {},
            "git": None,
        },
        "kind": "host",
        "by_host": {"host-1": [1, None, 2.5]},
        "user": "user-1",
        "ok": True,
        "files": ["logs/main.log"],
        "row": {"commit": None, "branch": None, "steps": 60},
    }


def test_a_host_named_like_a_word_of_ours_does_not_take_sentences_apart() -> None:
    redactor = Redactor({"host": "node", "user": "root"})
    document = {"host": "node", "node": "node", "user": "root", "title": "The node of rank 0 is slow."}
    assert redactor.document(document) == {
        "host": "host-1",
        "node": "host-1",
        "user": "user-1",
        "title": "The node of rank 0 is slow.",
    }
