"""The page that draws a run: made of ``web/`` (``make page``), served by the hub, carried inside ``report.html``."""
