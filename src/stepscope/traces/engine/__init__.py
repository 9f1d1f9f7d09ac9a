"""Many files → one analysis per rank, in local processes or on Ray."""
