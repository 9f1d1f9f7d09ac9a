"""Rules that find problems in a trace: pure functions from figures to findings, one file per family.

    thresholds.py     every number that a verdict depends on, with its reason
    view.py           the figures of all ranks as arrays, and what a finding costs
    host.py           DataLoader, garbage collection, compiling, Python, synchronizing calls, launches
    device.py         gaps between kernels, how well kernels use the device, memory
    stragglers.py     ranks that arrive last at collectives and why, jitter, pipeline bubbles
    communication.py  transfers that nothing hides, ranks that are slower than others

``findings.py`` runs them in order and adds the rules about known bad practices and truncated traces.
"""

__all__: list[str] = []
