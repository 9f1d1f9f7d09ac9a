"""Dependencies of one rank: what waited for what, the critical path of each step, and replays with changes."""
