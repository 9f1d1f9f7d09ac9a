"""What may be wrong in a trace: one file for each family of rules, pure functions from figures to findings.

    thresholds.py     every number that a verdict depends on, with its reason
    view.py           the figures of all ranks side by side, and what a finding costs
    loading.py        waiting for the DataLoader, collecting garbage, compiling
    python.py         Python that keeps a process without a device from computing
    host.py           synchronising calls, launches, and what else of the host a device waits for
    device.py         gaps between kernels, and how well kernels use the device
    stragglers.py     ranks that come last to collectives
    jitter.py         waiting that no rank in particular causes, pipeline bubbles among it
    lateness.py       why a rank comes late
    communication.py  transfer that is not hidden, ranks that are slower than others
    memory.py         how full a device is
    practices.py      choices that are known to be slow, traces that end early

``findings.py`` asks them in order.
"""

__all__: list[str] = []
