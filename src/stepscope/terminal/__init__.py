"""The terminal view: a run as reported by its hub, on a screen of text or in plain lines.

    client, documents ──► feed (two threads) ──► snapshot ──► screen, timing (functions) ──► app (Textual)
                                                     └──────► wording, plain

All data comes over the hub's HTTP API, also on the machine where the job runs, so that there is one data path. A
snapshot is an immutable value: freezing the view means keeping one. Only ``app`` loads Textual, and only when needed.
"""
