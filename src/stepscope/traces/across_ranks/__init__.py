"""Ranks compared: whose collective calls belong together, clocks, who arrives last, the job's critical path, replay."""
