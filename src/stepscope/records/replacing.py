"""Files that appear whole: written under another name beside their place, then renamed.

So what was there before stays until all of the new is written, whatever happens meanwhile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replaced"]


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Where to write what shall become ``path``; its name ends as that of ``path``.  Raises OSError.

    A link stays one, and what it leads to is replaced.  What is no file (``/dev/stdout``) is written to directly.
    """
    place = path.resolve()
    if place.exists() and not place.is_file():
        yield path
        return
    # In a folder of its own that only we can enter: nobody can put a link where we are about to write.
    folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=".stepscope-"))
    spare = folder / f"new{place.suffix}"
    try:
        yield spare
        spare.replace(place)
    finally:
        spare.unlink(missing_ok=True)
        folder.rmdir()
