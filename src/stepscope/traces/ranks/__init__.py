"""Ranks compared: which collectives belong together, who came last, what was waiting and what transfer, clocks."""
