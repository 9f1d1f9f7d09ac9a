"""Did a change make training slower?  Two or more runs in, one document out, with an interval and what it rests on.

- ``inputs`` reads what can be compared: runs, ``summary.json``, stored baselines, and numbers from any logger.
- ``statistics`` decides how large the change is and how far chance could have moved it.
- ``comparison`` builds the document (the verdict, phases, ranks, memory, communication, findings, context) and checks
  it against limits.
- ``repeats`` finds more runs of a baseline in its folder.
- ``text`` writes a document for people.

    document = compare_inputs([read_input(Path("runs/before"))], read_input(Path("runs/after")))
"""

from stepscope.comparison.comparison import compare_inputs
from stepscope.comparison.inputs import read_input

__all__ = ["compare_inputs", "read_input"]
