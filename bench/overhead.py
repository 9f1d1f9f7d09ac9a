"""What recording costs on a CPU: the same tiny loop bare, under Stepscope and, if asked, under TraceML.

python bench/overhead.py --sizes 1,5,20,deep --repeats 7
python bench/overhead.py --traceml-python OTHER_ENV/bin/python --json overhead.json
"""

from __future__ import annotations

import argparse

from harness import add_tool_arguments, measure, print_size, save, tools_of

__all__ = ["main"]

SIZES = ("1", "5", "20", "deep")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,5,20", help=f"of {','.join(SIZES)} (default: %(default)s)")
    add_tool_arguments(parser)
    args = parser.parse_args()
    tools = tools_of(args)
    results = {}
    for size in args.sizes.split(","):
        if size not in SIZES:
            parser.error(f"unknown size {size!r}")
        results[size] = measure(tools, size, args)
        print_size(f"size {size}: {args.steps} steps x {args.repeats} repeats", tools, results[size])
    if args.json:
        save(args.json, tools, results, args)


if __name__ == "__main__":
    main()
