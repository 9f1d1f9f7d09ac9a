"""Shared by all rules: the window of steps, the view of it, statistics, claims, samples and settings."""
