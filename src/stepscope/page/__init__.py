"""The page that draws a run: built from ``web/`` (``make page``), served by the hub, embedded in ``report.html``."""
