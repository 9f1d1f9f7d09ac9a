"""Dumps of torch's Flight Recorder, and stacks: from files of any kind to plain values. Standard library only.

``read`` makes a ``Dump`` of each file; ``hangs/`` compares and judges them. No dump is trusted: it may be foreign,
truncated or hostile. Reading one never runs its code or uses memory out of proportion to its size.
"""
