"""A hung job: from the evidence about its ranks to the one that blocks it. Pure; standard library only."""
