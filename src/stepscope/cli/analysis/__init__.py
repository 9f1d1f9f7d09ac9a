"""Commands that analyze what was recorded, by Stepscope or by other tools: one file per command."""
