"""The HTTP API for readers: one file per resource, and the parts that all answers share.

Resources: ``runs`` (with status and findings), ``steps`` (with the heat map), ``ranks``, ``samples`` (with events,
stacks and nodes), ``files``, ``stream`` (server-sent events), ``metrics`` (for Prometheus).  Shared: ``resource``
(declaration, parameters, OpenAPI), ``responses`` (formats and headers), ``auth`` and ``tokens``.
"""
