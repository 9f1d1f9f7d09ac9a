"""What the API shows of a run, as plain values: findings, nodes, ranks, samples, the map, files."""
