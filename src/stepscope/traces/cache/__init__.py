"""What was read, kept as Parquet, and what was found in it."""
