"""What to do about a process that does not run, by cause: for ``diagnosis/off_cpu.py`` and ``machine``."""

from __future__ import annotations

from stepscope.judge.advice import say

__all__ = ["OFF_CPU_ADVICE"]

OFF_CPU_ADVICE = (
    say(
        "Raise the CPU quota of its cgroup (cpu.max, docker --cpus, resources.limits.cpu in Kubernetes), or start "
        "fewer threads and DataLoader workers in it.",
        cause="quota",
    ),
    say(
        "Memory ran out and the kernel swapped: use less (fewer DataLoader workers, a smaller prefetch_factor), raise "
        "the cgroup's memory limit, or find what else uses the memory of {host}.",
        cause="swap",
    ),
    say(
        "The mapped file does not stay in memory: read it in the order in which it is stored, use a smaller part per "
        "rank, copy it to a faster disk, or leave more memory free for the page cache.",
        cause="mapped_file",
    ),
    say(
        "The DataLoader workers wait for the disk, so more of them hardly help: cache the data on a local disk or in "
        "memory, store it in fewer, larger files, and look for other readers of that disk (iostat -x 1).",
        cause="workers_disk",
    ),
    say(
        "See what it reads or writes (iotop, /proc/PID/io) and who else uses that disk of {host} (iostat -x 1); write "
        "in a background thread, or cache what is read in memory.",
        cause="disk",
    ),
    say(
        "Other virtual machines take the processors of {host}: ask for dedicated ones, or exclude the host.",
        cause="steal",
    ),
)
"""By cause. What to do about other tasks on its cores is in ``rules/straggler_advice.py``."""
