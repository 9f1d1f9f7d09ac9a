"""What the host did: operators, modules, annotations, memory, loading, compiling, pauses, waits for the device."""
