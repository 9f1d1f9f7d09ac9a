"""The hub: receives what a job's agents send, aligns it, runs the rules, and serves the HTTP API.

- ``ingest`` receives data: it authenticates agents, answers their requests, and follows the files of an active run.
- ``live`` keeps a run in memory, in arrays of bounded size: it digests steps, applies the rules, and has the findings.
- ``api`` serves data: one file per resource, and the authentication and response formats they share.

The modules here connect the three; ``pyproject.toml`` has the layers, highest first: process, app, ``api``,
runs, ``ingest``, ``live``, server, limits.  ``process.py`` runs the hub of one job; ``server.py``, ``transport.py`` and
``limits.py`` accept connections; ``app.py`` routes requests; ``runs.py`` has the runs that are served: each an
``OpenRun`` (``open_run.py``) with a model of a finished run (``past_run.py``) or of one that is still recorded
(``active_run.py``); ``report_copy.py`` packs a run into one page, and ``app.py`` writes it as ``report.html``;
``audit.py`` logs who read and who sent what.
"""
