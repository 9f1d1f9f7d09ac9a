"""How much memory a process may use, by the machine and by cgroups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.agent.sampling.host import memory_limit_of

GB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64 * GB),
        ({"proc/7/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 64 * GB),
        ({"proc/7/cgroup": "0::/pod/a\n", "sys/fs/cgroup/pod/memory.max": str(8 * GB)}, 8 * GB),
        (
            {
                "proc/7/cgroup": "0::/pod/a\n",
                "sys/fs/cgroup/pod/memory.max": str(8 * GB),
                "sys/fs/cgroup/pod/a/memory.max": str(9 * GB),
            },
            8 * GB,
        ),
        # In a container: the path is the host's, the limit lies at the top.
        ({"proc/7/cgroup": "0::/../../pod/a\n", "sys/fs/cgroup/memory.max": str(4 * GB)}, 4 * GB),
        (
            {
                "proc/7/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n",
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": str(2 * GB),
            },
            2 * GB,
        ),
        ({"proc/7/cgroup": "nonsense\n0::/a", "sys/fs/cgroup/a/memory.max": "many"}, 64 * GB),
    ],
)
def test_the_least_of_machine_and_cgroups(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert memory_limit_of(7, tree(tmp_path, files), 64 * GB) == expected
