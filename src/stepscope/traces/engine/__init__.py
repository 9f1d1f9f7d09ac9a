"""Many files → one analysis per rank: processes here, or Ray."""
