"""What the page shows of files that are not runs: traces, Flight Recorder dumps, comparisons and sweeps."""
