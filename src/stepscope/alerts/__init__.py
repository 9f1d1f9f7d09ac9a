"""Alerts: the rules that the user set, incidents, the messages about them, and their delivery.

    rules on findings and measures ──► Signal ──► Incident (one per cause) ──► Message ──► outbox on disk ──► sender

The run's hub judges and writes the outbox; the sender is a separate process, so that a receiver that is slow or down
delays neither.  Everything survives the death of either: ``incidents.jsonl`` and ``alerts/`` in the run directory.
"""
