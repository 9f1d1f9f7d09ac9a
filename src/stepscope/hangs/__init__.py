"""A job that stands still: from what was gathered about its ranks to who holds it up.  Pure; standard library only."""
