"""Inside the training process: hooks → ledger → ring.  Standard library and the user's own torch, nothing else.

Reading order: ``ledger`` (where the time of a step goes), ``recorder`` (one step becomes one record), ``steps`` (when a
step ends), then one file per thing that is hooked (``forward``, ``backward``, ``optimizer``, ``dataloader``,
``transfer``, ``waiting``, ``checkpoint``), ``device`` (CUDA events), ``bootstrap`` (how all this gets into a process)
and ``api`` (what a script may call itself).

Three rules hold everywhere here.  Nothing starts a thread, opens a socket or synchronises a device.  Whatever of ours
fails is swallowed and counted by ``guard`` and by nothing else.  Every patch can be undone (``patches``).
"""
