"""Commands about a hub: serve runs, send them to one, who may read them, and what talks to one for people."""
