"""Shipped fakes for exact tests: a synthetic cluster (``cluster``) whose runs look like recorded ones."""
