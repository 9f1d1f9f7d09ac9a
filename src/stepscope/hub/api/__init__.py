"""The HTTP API for readers: one file per group of resources, and the parts that all answers share.

Resources: ``runs`` (with status, findings and files), ``steps`` (with the heat map and the ranks), ``samples`` (with
events, stacks and nodes), ``compare`` (with sweeps), ``stream`` (server-sent events), ``metrics`` (for Prometheus).
Shared: ``resource`` (declaration, parameters, OpenAPI), ``responses`` (formats and headers), ``auth`` (and tokens).
"""
