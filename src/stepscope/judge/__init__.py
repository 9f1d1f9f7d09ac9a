"""What rules on runs (``diagnosis/``) and on traces (``traces/``) share: claims on time, the chain, statistics."""
