"""``stepscope archive``: copy finished runs to object storage."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.archive.location import parse_url
from stepscope.cli.arguments import locate_run
from stepscope.cli.output import progress_bar
from stepscope.errors import ArchiveError, RunError
from stepscope.records.text import bytes_text, count_text, say

if TYPE_CHECKING:
    from stepscope.archive.cache import Archive

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "copy finished runs to object storage, and optionally delete them here"
EPILOG = """\
examples:
  stepscope archive runs/night --to s3://bucket/team
  stepscope archive runs/* --to s3://bucket/team --delete-local
  stepscope archive night --to file:///mnt/archive

  stepscope list s3://bucket/team                    list, history and serve read the archive
  stepscope report s3://bucket/team/night            report, compare and sql read a run in it

Every copy is read back and compared.  A run that is there already is not copied again.  With --delete-local, a run is
deleted after all of its copy was compared once more; never a run that is active, tagged, or used by another machine.
Needs: pip install 'stepscope[archive]' for s3://, 'stepscope[archive-gcs]' for gs://.  Credentials are read from the
environment or a profile, as the storage's own tools do (docs/archive.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories, or names of runs in runs/")
    parser.add_argument(
        "--to",
        metavar="URL",
        type=parse_url,
        required=True,
        help="the archive: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, file:///FOLDER",
    )
    parser.add_argument("--replace", action="store_true", help="replace an earlier version of the same run there")
    parser.add_argument(
        "--delete-local", "--delete_local", action="store_true", help="delete the run here once its copy is verified"
    )
    parser.add_argument("--quiet", action="store_true", help="print only errors")


def run(args: argparse.Namespace) -> int:
    from stepscope.archive.cache import Archive

    archive = Archive(args.to, os.environ)
    failed = 0
    for path in dict.fromkeys(map(locate_run, args.runs)):
        try:
            _archive(archive, path, args)
        except (ArchiveError, RunError) as error:
            say(str(error))
            failed += 1
    return ArchiveError.exit_code if failed else 0


def _archive(archive: Archive, run_dir: Path, args: argparse.Namespace) -> None:
    from stepscope.archive.upload import archive_run, delete_archived

    with progress_bar(f"archiving {run_dir}", bytes_text, quiet=args.quiet) as progress:
        archived = archive_run(archive.storage, run_dir, replace=args.replace, progress=progress)
    archive.forget_list()
    manifest = archived.manifest
    if not args.quiet:
        url = archive.url.run(manifest.run.name)
        size = f"{count_text(len(manifest.files), 'file')}, {bytes_text(manifest.stored)}"
        say(f"{run_dir} is already archived as {url}" if archived.present else f"archived {run_dir} as {url} ({size})")
    if args.delete_local:
        with progress_bar(f"comparing the copy of {run_dir}", bytes_text, quiet=args.quiet) as progress:
            delete_archived(archive.storage, run_dir, archived, progress=progress)
        if not args.quiet:
            say(f"deleted {run_dir}")
