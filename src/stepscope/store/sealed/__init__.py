"""The sealed form of a run: Parquet files, and SQL over them."""
