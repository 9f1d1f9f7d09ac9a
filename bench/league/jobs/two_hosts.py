"""Starts a script once per rank, on two hosts that are in truth one: half of the ranks see another host name.

Knows nothing of Stepscope, nor of torch.  Needs the right to make a UTS namespace (root):

    two_hosts.py RANKS script.py …
"""

import os
import socket
import subprocess
import sys

NAMES = ("host-a", "host-b")


def main():
    ranks, script = int(sys.argv[1]), sys.argv[2:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # gloo asks for the address of the host's own name, which nobody knows here: the loopback instead.
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    per_host = ranks // len(NAMES)
    processes = []
    for rank in range(ranks):
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', NAMES[rank // per_host]]
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % per_host), "WORLD_SIZE": str(ranks)}
        processes.append(subprocess.Popen([*named, sys.executable, *script], env={**common, **own}))
    codes = [process.wait() for process in processes]
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
