"""What depended on what: the critical path of a rank and over ranks, and the same replayed with changes."""
