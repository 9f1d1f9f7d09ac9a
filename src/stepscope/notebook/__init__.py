"""Runs in a notebook: ``stepscope.show()``, and ``stepscope.live()`` in the notebook that trains.

Both are called in a process that may be training, so they load only the standard library; separate processes do all
computing and serving.
"""
