"""The bytes that agents and the hub exchange: blocks of steps, frames and the handshake. The only I/O is for the key.

Standard library only, because the agent loads it. Data from the network is checked against the limits in
``wire/frames.py`` before it is used.
"""
