"""Made-up runs, traces, dumps and load, for benchmarks and tests: a cluster (``cluster``) whose runs look recorded."""
