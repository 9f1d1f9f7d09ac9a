"""What is written into a run directory while the run lasts, and read back from there."""
