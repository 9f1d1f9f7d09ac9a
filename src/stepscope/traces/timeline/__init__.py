"""One clock-aligned timeline of all ranks, for Perfetto."""
