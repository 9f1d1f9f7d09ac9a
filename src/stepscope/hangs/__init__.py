"""A hung job, live or from its dumps: from evidence about its ranks to the one that blocks it. No dependencies."""
