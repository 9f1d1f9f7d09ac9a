"""A trace as columns, and what every analysis needs from it: which rows count, launches, nesting."""
