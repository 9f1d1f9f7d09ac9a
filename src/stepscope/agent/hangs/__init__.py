"""Hang detection on one node: who makes no progress, what is known about those ranks, and what is done about it."""
