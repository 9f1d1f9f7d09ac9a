"""What a hub receives from other nodes: journals of frames, positions, parts, and the way back to records."""
