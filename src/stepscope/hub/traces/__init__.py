"""Traces in the page: which folders have some, and a worker process that makes their views."""
