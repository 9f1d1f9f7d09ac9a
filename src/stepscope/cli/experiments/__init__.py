"""One file per command about many runs: compare and gate them, their trend, sweeps, labels, deleting."""
