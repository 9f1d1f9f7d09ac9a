"""The rules: one module per family of findings.  ``diagnosis.findings`` runs them in order."""
