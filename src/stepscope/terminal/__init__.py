"""The terminal view: a run as reported by its hub, on a screen of text or in plain lines.

    feed (client, two threads) ──► documents (snapshot) ──► screen, wording (functions) ──► app (Textual)
                                                       └──► wording, plain

All data comes over the hub's HTTP API, also on the machine where the job runs, so that there is one data path. A
snapshot is an immutable value: freezing the view means keeping one. Only ``app`` loads Textual, and only when needed.
"""
