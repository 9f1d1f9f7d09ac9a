"""The ring: how a training process tells the world what it does without ever waiting for the world.

One memory-mapped file per process, one writer (``RingWriter``, in the training process), any number of readers
(``RingReader``, in the agent).  Standard library only.
"""

from stepscope.ring.layout import RingState
from stepscope.ring.reader import LastCollective, LivePhase, RingBatch, RingHeader, RingReader, split
from stepscope.ring.writer import RingWriter

__all__ = ["LastCollective", "LivePhase", "RingBatch", "RingHeader", "RingReader", "RingState", "RingWriter", "split"]
