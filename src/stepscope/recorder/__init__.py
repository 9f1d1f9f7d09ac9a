"""Inside the training process: hooks → ledger → ring.  Uses the standard library and the user's own torch only.

Reading order: ``ledger`` (where the time of a step goes), ``recorder`` (when a step ends, and how it becomes one
record), then ``hooks/`` with one file per hooked part of torch (``forward``, ``backward``, ``optimizer``,
``dataloader``, ``collectives``, ``ddp``, ``compiled``, ``checkpoint``), ``device`` (CUDA events), ``bootstrap`` (how
all this gets into a process) and ``api`` (what a script may call itself).

Three rules hold everywhere here.  Nothing starts a thread or opens a socket, except torch's own worker server
(``worker_server``), and nothing synchronizes a device.  Our own errors are swallowed and counted by ``guard.failsafe``
and nowhere else.  Every patch can be undone (``guard.Patches``).
"""
