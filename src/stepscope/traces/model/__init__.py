"""A trace as columns, and what all analyses ask of it: which rows count, what launched what, what lies inside what."""
