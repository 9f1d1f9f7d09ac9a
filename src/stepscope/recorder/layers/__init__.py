"""Sampled looks at a model's layers: ``tree`` (its modules), ``sampled_step`` (what they show), ``sampler`` (when)."""
