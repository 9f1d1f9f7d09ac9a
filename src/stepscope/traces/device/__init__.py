"""Analyses of a device: time by kind of work, idle time by cause, kernels, launches, copies, utilization."""
