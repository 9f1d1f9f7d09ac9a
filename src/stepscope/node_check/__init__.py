"""The check of a node: measure it for some seconds, and compare it with its own past and with other nodes.

Pure figures and files; the command is ``cli/analysis/probe.py``.
"""

from stepscope.node_check.judge import Verdict, judge
from stepscope.node_check.measure import LONGEST_S, measure_node
from stepscope.node_check.results import append_past, publish, read_past, read_peers, read_results

__all__ = [
    "LONGEST_S",
    "Verdict",
    "append_past",
    "judge",
    "measure_node",
    "publish",
    "read_past",
    "read_peers",
    "read_results",
]
