"""Dumps of torch's Flight Recorder: from files of any kind to the rank that blocks the job. Standard library only.

``read`` makes a ``Dump`` of each file, ``judge`` a ``Verdict`` of all of them. No dump is trusted: it may be foreign,
truncated or hostile. Reading one never runs its code or uses memory out of proportion to its size.
"""
