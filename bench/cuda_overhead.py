"""What recording costs on a GPU: a transformer whose step is bound by the host (or by the device), bare and recorded.

Needs a CUDA build of torch (2.11 or later), stepscope and the files beside this one; nothing else.

python bench/cuda_overhead.py --repeats 7
python bench/cuda_overhead.py --repeats 7 --workload large --steps 100
python bench/cuda_overhead.py --tools stepscope,traceml      # TraceML importable by this interpreter
"""

from __future__ import annotations

import argparse

from harness import add_tool_arguments, measure, print_size, save, tools_of

__all__ = ["main"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload",
        choices=("transformer", "large"),
        default="transformer",
        help="transformer: 5 ms, bound by the host; large: 50 ms, bound by the device",
    )
    parser.add_argument("--device", default="cuda", help="cpu tries the script out where there is no GPU")
    add_tool_arguments(parser)
    args = parser.parse_args()
    tools = tools_of(args)
    rows = measure(tools, args.workload, args, device=args.device)
    device = rows["bare"][0]["device"]
    print_size(f"{args.workload} on {device}: {args.steps} steps x {args.repeats} repeats", tools, rows)
    if args.json:
        save(args.json, tools, {args.workload: rows}, args)


if __name__ == "__main__":
    main()
