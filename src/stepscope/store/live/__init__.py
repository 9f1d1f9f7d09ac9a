"""Files that this node's processes and agent write while a run is active, with their readers.

    ring_files      steps/KEY.seg and steps/KEY.json: the records of one ring and its last known header
    ring_records    all records of each ring: its segment, then what only the ring still holds
    sample_files    samples.jsonl and samples/: host, process and GPU samples, thinned with age; layers.jsonl
    failures        errors/, stacks.jsonl, hangs/ and flight/: what went wrong
    logs            logs/ and outputs/: what the ranks printed, bounded in size, and known lines in it

Standard library only when imported: the agent uses these modules.
"""
