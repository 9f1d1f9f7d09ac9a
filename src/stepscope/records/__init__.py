"""The plain records that flow through Stepscope and their byte layouts; no I/O, no torch.

``phases``, ``slot`` and ``identity`` are used inside the training process and import only the standard library;
``series`` and ``finding`` are for everything downstream.
"""
