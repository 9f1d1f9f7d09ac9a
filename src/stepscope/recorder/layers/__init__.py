"""Samples of a model's layers: ``tree`` (its modules), ``sampled_step`` (what they show), ``sampler`` (when),
``memory_dump`` (what a process held when it ran out of memory, and snapshots)."""
