"""The live model: what the hub knows of a run while it lasts, in arrays of bounded size.

``live_run`` is what the rest of the hub talks to; the other modules are its parts.
"""
