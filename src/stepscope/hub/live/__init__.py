"""The state of a run in memory, in arrays of bounded size.

The rest of the hub uses ``live_run``, which feeds and reads the others: ``registry`` (the rings), ``step_arrays`` (the
steps of every rank), ``digests`` (each step over its ranks), ``lines`` (events, samples, stacks).  ``rules`` evaluates
the rules on a copy, in a thread.
"""
