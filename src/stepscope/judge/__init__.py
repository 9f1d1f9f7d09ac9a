"""What rules on runs (``diagnosis/``) and on traces (``traces/``) share: claims on time and the chain of rules."""
