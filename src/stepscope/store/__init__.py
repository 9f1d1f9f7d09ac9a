"""The run directory: the only code that knows its files.

    run.json               what was run, and how it ended              meta, create
    steps/KEY.seg          steps of one process while the run lasts    segments
    steps/KEY.json         what its ring's header last said            sidecar
    samples.jsonl          host, process and GPU samples               jsonl, samples
    events.jsonl           what happened when                          jsonl
    stacks.jsonl           where ranks were outside all phases         jsonl, stacks
    errors/ logs/ rings/   written by the training processes           records.places
    steps.parquet  samples.parquet  ranks.json                         the sealed form of the above: seal
    summary.json  summary.txt  findings.json                           results

``create``, ``meta``, ``segments`` (its writing side), ``sidecar``, ``jsonl`` and ``processes`` need only the standard
library, since the launcher and the agent use them; the others load numpy and DuckDB when they are called.
"""
