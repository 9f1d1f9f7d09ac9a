"""Analyses of the host: operators, modules, annotations, memory, loading, compiling, pauses, waits for the device."""
