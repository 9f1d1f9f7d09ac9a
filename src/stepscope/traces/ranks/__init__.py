"""Comparison of ranks: which collectives belong together, which rank arrived last, waiting and transfer, clocks."""
