"""Starting a job: its command and nodes, the processes beside it, and the recording from start to summary."""
