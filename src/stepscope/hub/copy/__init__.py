"""A copy of a run to send away: what the hub would answer, inside the page (``report.html``)."""
