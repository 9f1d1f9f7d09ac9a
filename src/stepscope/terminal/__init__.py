"""The terminal view: a run as its hub tells it, on a screen of text or in plain lines.

    place ──► client, messages ──► feed (two threads) ──► snapshot ──► draw (functions) ──► app (Textual)
                                                              └──────► lines, plain

Everything comes over the hub's HTTP API, also on the machine where the job runs, so there is one path of data.  A
snapshot is a value: to freeze the view is to hold on to one.  Only ``app`` loads Textual, when it is asked for.
"""
