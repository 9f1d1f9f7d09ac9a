"""Data that a hub receives from other nodes, and the way back to records.

    receiver    accept each frame once, and put its files into the run directory
    journal     inbox/NNNNNN.frames: the accepted frames; and each sender's position in them
    parts       parts/: full journals rewritten as Parquet steps and thinned samples while the run is active
    remote      everything that other nodes sent, as records on the hub's clock

These modules import numpy; the launcher and the agent do not load them.
"""
