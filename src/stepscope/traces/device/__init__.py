"""What a device did: time by kind of work, idle time by cause, kernels, launches, copies, how well it was used."""
