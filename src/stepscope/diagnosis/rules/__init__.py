"""The rules: one module per family of findings.  ``diagnosis.rulebook`` lists them in order."""
