"""The ring: a training process publishes what it does without ever waiting for a reader.

Each process has one memory-mapped file with one writer (``RingWriter``, in the training process) and any number of
readers (``RingReader``, in the agent). Standard library only.
"""

from stepscope.ring.layout import RingState
from stepscope.ring.reader import LastCollective, LivePhase, RingBatch, RingHeader, RingReader, split
from stepscope.ring.writer import RingWriter

__all__ = ["LastCollective", "LivePhase", "RingBatch", "RingHeader", "RingReader", "RingState", "RingWriter", "split"]
