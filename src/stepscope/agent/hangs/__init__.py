"""Hang detection on one node: which ranks make no progress, the evidence about them, and the response."""
