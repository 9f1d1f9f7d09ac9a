"""What agents and the hub say to one another, as bytes: blocks of steps, frames, the handshake.  No I/O but the key's.

Standard library only: the agent loads it.  What comes from the network is held to ``limits`` before it is believed.
"""
