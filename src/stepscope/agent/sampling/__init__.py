"""What the agent samples each second: the host, its GPUs, and the round trips to other nodes."""
