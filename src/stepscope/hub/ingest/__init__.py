"""Receiving what agents send, over HTTP or from files.

``auth`` decides which agents may send and which ranks are theirs; ``endpoints`` answers their requests.
``run_ingest`` combines both, for one run or for a folder of runs (``stepscope serve --accept``).
``tail`` reads a run from disk: this node's own files, and the inbox of the other nodes.
"""
