"""The rules: one module per family of findings. ``diagnosis.findings`` asks them in order."""
