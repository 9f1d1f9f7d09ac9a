"""A trace as columns, and what every analysis asks of it: which rows count, what launched what, what lies inside what."""
