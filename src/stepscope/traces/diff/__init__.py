"""Two jobs compared: what changed, and which part of the step's change each explains."""
