"""Finished runs in object storage: copied there, listed and read there through a local cache.

    location    ``s3://bucket/prefix``, ``file:///data/archive``: the words of a user as an address
    storage     the objects under an address, through fsspec: bounded reads, all errors as ``ArchiveError``
    manifest    what an archived run consists of; every name, size and checksum is checked when it is read
    catalog     the facts about all archived runs, so that a list needs a few requests
    upload      copy a run, read the copy back, make it visible
    cache       archived runs and the catalog on the local disk: private, bounded, verified

The layout, below the address (docs/archive.md explains why):

    NAME/DIGEST/FILE                      the files of a run; DIGEST stands for their names and contents
    NAME/manifest.json                    written last: without it the run does not exist
    .stepscope/entries/NAME@DIGEST.json   what a list shows of one run
    .stepscope/packs/SHA256.json.gz       the same of many runs

Everything read from storage may come from anyone.  fsspec and what it needs are imported by ``storage`` alone, when it
is first used; nothing here runs in a training process.
"""
