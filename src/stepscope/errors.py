"""Every exception that can reach the command line.

    StepscopeError                 base; the command line prints its message as one line
    ├── UsageError                 the command line or an API call is wrong            exit 2
    ├── RunError                   a run directory cannot be used                      exit 3
    │   ├── NotARun                the folder is not a Stepscope run
    │   └── RunUnwritable          the folder cannot be created or written
    ├── TraceError                 a trace or its description cannot be used           exit 3
    ├── DumpError                  a Flight Recorder dump cannot be used               exit 3
    ├── CompareError               an input of a comparison cannot be used             exit 3
    │   └── CompareTooShort        it has too few steps to tell                        exit 2
    ├── CaptureError               a capture cannot be made                            exit 3
    ├── FrameError                 data from the network is not in our format          exit 3
    ├── HubError                   the hub cannot be started or reached                exit 3
    │   ├── HubRefused             it answers but does not accept us
    │   │   └── KeyRefused         because it has a different key
    │   └── HubMissing             it has no such run, rank or file
    ├── ExportError                a tracker or collector did not take a run           exit 3
    ├── ArchiveError               object storage cannot be used, or a copy is damaged exit 3
    │   └── ArchiveMissing         it has no such bucket, run or object
    └── RingError                  a ring file cannot be used                          exit 3
        ├── RingForeign            not a ring, or cut off
        ├── RingVersion            written with another version of the layout
        └── RingNoSpace            the file system cannot reserve the ring's bytes

Only ``cli.main.main()`` turns these into an exit code. None of them ever reaches a training script: the recorder's
guard (``recorder/guard.py``) catches them.
"""

from __future__ import annotations

__all__ = [
    "ArchiveError",
    "ArchiveMissing",
    "CaptureError",
    "CompareError",
    "CompareTooShort",
    "DumpError",
    "ExportError",
    "FrameError",
    "HubError",
    "HubMissing",
    "HubRefused",
    "KeyRefused",
    "NotARun",
    "RingError",
    "RingForeign",
    "RingNoSpace",
    "RingVersion",
    "RunError",
    "RunUnwritable",
    "StepscopeError",
    "TraceError",
    "UsageError",
]


class StepscopeError(Exception):
    """Base class of all Stepscope errors; the message is written for the user."""

    exit_code = 1


class UsageError(StepscopeError):
    exit_code = 2


class RunError(StepscopeError):
    exit_code = 3


class NotARun(RunError):
    pass


class RunUnwritable(RunError):
    pass


class TraceError(StepscopeError):
    exit_code = 3


class DumpError(StepscopeError):
    exit_code = 3


class CompareError(StepscopeError):
    exit_code = 3


class CompareTooShort(CompareError):
    exit_code = 2


class CaptureError(StepscopeError):
    exit_code = 3


class FrameError(StepscopeError):
    exit_code = 3


class HubError(StepscopeError):
    exit_code = 3


class HubRefused(HubError):
    pass


class KeyRefused(HubRefused):
    pass


class HubMissing(HubError):
    pass


class ExportError(StepscopeError):
    exit_code = 3


class ArchiveError(StepscopeError):
    exit_code = 3


class ArchiveMissing(ArchiveError):
    pass


class RingError(StepscopeError):
    exit_code = 3


class RingForeign(RingError):
    pass


class RingVersion(RingError):
    pass


class RingNoSpace(RingError):
    pass
