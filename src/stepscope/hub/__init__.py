"""The hub: receives what the agents of a job send, aligns it, runs the rules, and serves the HTTP API."""
