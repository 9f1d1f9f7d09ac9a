"""The plain records that flow through Stepscope, their byte layouts, and the names and texts that all packages share.

Nothing here imports torch.  The training process uses ``steps``, ``collectives``, ``identity``, ``paths``, ``files``,
``run_clock`` and ``text``, which import only the standard library; ``series`` and ``finding`` are for everything
downstream.
"""
