"""Starting a job: its command and nodes, its helper processes, and the recording from start to summary."""
