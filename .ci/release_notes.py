"""Print what the changelog says of a release, for its page.

    python .ci/release_notes.py v0.4.0 --links https://HOST/OWNER/REPOSITORY/blob/v0.4.0

It fails if the tag is not the version of the package, or if the changelog has no text for it: the release workflow runs
it before it builds anything.  ``--links`` makes links to files of the repository absolute.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:|#)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the changelog of a release.")
    parser.add_argument("tag", help="v0.4.0 or 0.4.0")
    parser.add_argument("--links", metavar="URL", help="where the files of this tag are")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_args()
    version = args.tag.removeprefix("v")
    built = VERSION.search((args.root / "src/stepscope/__init__.py").read_text())
    if built is None or built[1] != version:
        sys.exit(f"{args.tag} is not the version in src/stepscope/__init__.py ({built[1] if built else 'none'})")
    notes = notes_of(version, (args.root / "CHANGELOG.md").read_text())
    if not notes:
        sys.exit(f"CHANGELOG.md has no text for {version}")
    print(LINK.sub(f"]({args.links.rstrip('/')}/", notes) if args.links else notes)


def notes_of(version: str, changelog: str) -> str:
    """The text below the heading of this version, up to the next."""
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        if heading.startswith(f"[{version}]"):
            return text.strip()
    return ""


if __name__ == "__main__":
    main()
