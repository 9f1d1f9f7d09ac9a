"""Dumps of torch's Flight Recorder: from files of any kind to who holds the job up.  Standard library only.

``read`` makes a ``Dump`` of each file, ``judge`` a ``Verdict`` of all of them together.  Nothing here trusts a dump: it
may be foreign, cut off or hostile, and none of it runs code or takes memory out of proportion.
"""
