"""The HTTP API: one file per resource, and what all answers have in common."""
