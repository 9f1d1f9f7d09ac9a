"""The agent's samples, once a second: the host, its GPUs, and the round trips to other nodes."""
