"""Rules on samples of layers: what gradients and weights are like, and whether replicas are equal."""
