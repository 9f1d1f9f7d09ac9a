"""The state of a run in memory, in arrays of bounded size; ``live_run`` is what the rest of the hub talks to."""
