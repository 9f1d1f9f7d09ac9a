"""What all rules share: the window of steps, the view on it, statistics, claims, samples and settings."""
