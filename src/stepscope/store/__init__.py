"""The run directory: the only code that knows its files.

A run directory has three kinds of data, each with a sub-package:

    live/      what this node's processes and agent write while the run is active
        steps/KEY.seg  steps/KEY.json                  records and last header of one ring    ring_files, ring_records
        samples.jsonl  samples/                        host, process and GPU samples          sample_files
        layers.jsonl                                   looks at the model's layers            sample_files
        errors/  stacks.jsonl  hangs/  flight/         what went wrong                        failures
        unrecorded/                                    why nothing was recorded               failures
        logs/  outputs/                                what the ranks printed                 logs
    inbox/     what the run's hub receives from other nodes
        inbox/NNNNNN.frames  inbox/places.jsonl        frames as they arrived                 journal, receiver
        parts/  positions.json                         full journals rewritten in columns     parts
        (no files)                                     all of the above as records            remote
    sealed/    the final form of both, written when the run is over
        steps.parquet  comm.parquet  collectives.parquet  ranks.json                          parquet
        samples.parquet                                                                       samples
        (no files)                                     write all of them; SQL over a run      seal, sql

The modules of this package serve all three:

    paths, file_io, locks      file names; atomic writes and JSON lines; locks and atomic replacement of several files
    create, documents          begin a run; run.json, nodes.json, hub.json, summary.json, findings.json
    liveness                   lease.json, processes and session: whether a run is active
    load, rank_series          a run in any state as ``RunData``: the series of each rank and all other records
    catalog                    the runs of a folder or of a user: list, label, delete; outside any run directory,
                               the folders of a user's runs and the hub of all of them

``events.jsonl`` (what happened when) is written by the agent with ``file_io``; sealing adds the users' notes to it.

Importing the modules of ``live`` and of this package, except ``rank_series``, needs only the standard library, since
the launcher and the agent use them.  The others import numpy, DuckDB or msgspec, some of them only when called.
"""
