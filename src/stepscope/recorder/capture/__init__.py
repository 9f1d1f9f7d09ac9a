"""Captures in the training process: torch's profiler for a few steps, on request or on schedule.

``captures`` decides at the end of a step what to do next (an order is noticed through ``recorder/requests.py``),
``profiler`` is the seam to torch's profiler (ours and the script's own), and ``labels`` names steps and phases in what
a profiler records.  Nothing here runs in a step unless a capture is due or a profiler is active.
"""
