"""Sends a node's run directory to the hub until the hub has all of it. The hub keeps track of what it has."""
