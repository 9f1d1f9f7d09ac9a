"""Incidents as documents: what happened, when it began, what it cost, and everything recorded around its onset.

    incidents.jsonl, finding history, messages, logs, other runs, git (read) ──► Inputs (inputs)
    Inputs ──► the document, without I/O (builder, samples, onset, timeline)
    the document ──► Markdown and terminal (text), page (web/)

An incident gathers evidence; it decides nothing.  Every statement in the document has a ``source``.
"""
