"""Runs in a notebook: ``stepscope.show()``, and ``stepscope.live()`` in the one that trains.

Both are called in a process that may be training: they load the standard library only, and whatever is to be computed
or served is done by a process of its own.
"""
