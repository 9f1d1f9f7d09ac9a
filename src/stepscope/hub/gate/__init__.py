"""The hub's entrance: who may come in, what may come in, and how much of it; everything refused is counted."""
