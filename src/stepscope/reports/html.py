"""What every page of ours is made in: one file, nothing fetched, light and dark, every word escaped.

The page forbids itself whatever it does not bring along (``Content-Security-Policy``): styles and scripts count only if
they are the very ones we wrote, so a name in a trace that got past the escaping could still not run.
"""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html import escape

__all__ = ["escaped", "page"]

BASE_STYLE = """
:root { color-scheme: light dark; --back: #fdfdfc; --text: #1f2328; --soft: #6a737d; --line: #d8dde3; --card: #f4f6f8;
  --bad: #b3261e; --good: #1a7f37; --doubt: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --back: #16191d; --text: #e4e7ea; --soft: #9aa4ae; --line: #363c44;
  --card: #1f242a; --bad: #ff8a80; --good: #6fcf87; --doubt: #e8b64c; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; border-bottom: 1px solid var(--line); }
.bad { color: var(--bad); } .good { color: var(--good); } .doubt { color: var(--doubt); } .soft { color: var(--soft); }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: .2rem 1rem; } dt { color: var(--soft); }
dd { margin: 0; min-width: 0; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--card); padding: .6rem; overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: .15rem .5rem; text-align: left; }
th { color: var(--soft); font-weight: normal; } .wide { overflow-x: auto; }
"""


def page(title: str, body: str, *, tone: str, style: str = "", script: str = "") -> str:
    """``title`` as plain text, ``body`` as HTML; ``tone`` is the class of the headline: bad, doubt or good."""
    styles = BASE_STYLE + style
    allowed = f"default-src 'none'; style-src {_hash(styles)}" + (f"; script-src {_hash(script)}" if script else "")
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{styles}</style></head>\n"
    )
    scripts = f"<script>{script}</script>\n" if script else ""
    return f'{head}<body>\n<h1 class="{tone}">{escaped(title)}</h1>\n{body}\n{scripts}</body></html>\n'


def escaped(text: str) -> str:
    """For text and for attributes in quotes; what cannot be printed is marked as such."""
    return escape("".join(c if c.isprintable() else "�" for c in text))


def _hash(content: str) -> str:
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
