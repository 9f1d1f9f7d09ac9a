"""Pods on one machine: the containers of real manifests, in namespaces, as a container runtime runs them.

    pods = Pods(network.hosts, folder, workspace=folder)
    hub = pods.start(job, index=0)          # ``job``: a Job of a manifest, as a dictionary
    pods.publish()                          # from now on the pods' names can be resolved
    hub.terminate()                         # SIGTERM to its first process, as Kubernetes does

What is real: the command with its variables, the user without a name, a home folder or a capability, the read-only
root (other roots are as well, but for ``/tmp``), the process, network and mount namespaces, 64 MiB of ``/dev/shm``,
Secrets as files of root that the pod's group can read, volumes with their owner and mode.  What is not: the image,
which is this machine's; name service, which is ``/etc/hosts``; limits of CPU and memory.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from namespaces import Host

__all__ = ["Pod", "Pods", "command_of", "variables_of"]

ROOT = Path(__file__).resolve().parents[2]
# root of the container, user, groups, then pairs of a source and a target, "--", and the command
SETUP = r"""
set -eu
root=$1 user=$2; shift 2
mount --make-rprivate /
mount -t tmpfs -o mode=755 container "$root"
for name in usr bin sbin lib lib64 etc; do
    if [ -L "/$name" ]; then
        cp -P "/$name" "$root/$name"
    elif [ -d "/$name" ]; then
        mkdir "$root/$name"
        mount --bind "/$name" "$root/$name"
    fi
done
mkdir "$root/proc" "$root/dev"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 dev "$root/dev"
for name in null zero full random urandom; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm"
mount -t tmpfs -o size=64m,mode=1777 shm "$root/dev/shm"
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then
        mkdir -p "$root$2"
    fi
    mount --bind "$1" "$root$2"
    shift 2
done
shift
mount -o remount,ro "$root"
exec chroot "$root" setpriv --reuid "$user" --regid "$user" --clear-groups --inh-caps=-all --bounding-set=-all \
    --no-new-privs "$@"
"""
GROUP_MODES = {"persistentVolumeClaim": 0o2775, "emptyDir": 0o2777}


def variables_of(container: Mapping[str, Any], index: int) -> dict[str, str]:
    """Of the environment: the manifest's own, and those that Kubernetes adds."""
    given = {variable["name"]: variable["value"] for variable in container.get("env", [])}
    return {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1", **given}


def command_of(container: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    """The words, with ``$(NAME)`` replaced as Kubernetes does."""
    words = [*container.get("command", []), *container.get("args", [])]
    return [re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word) for word in words]


class Pod:
    def __init__(self, name: str, host: Host, folder: Path, process: subprocess.Popen[bytes], subdomain: str) -> None:
        self.name = name
        self.host = host
        self.folder = folder
        self.process = process
        self.subdomain = subdomain

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def terminate(self) -> None:
        """Send SIGTERM to its first process."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all its processes, as if its machine had gone."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        (first,) = psutil.Process(self.process.pid).children()
        os.kill(first.pid, number)


class Pods:
    def __init__(self, hosts: Sequence[Host], folder: Path, *, workspace: Path, secrets: Mapping[str, str]) -> None:
        """``hosts``: one per pod, in the order of their start. ``workspace`` is in each of them as ``/workspace``."""
        self._hosts = list(hosts)
        self._folder = folder
        self._workspace = workspace
        self._secrets = secrets
        self.pods: list[Pod] = []
        self.path = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin"
        """What an image would set."""

    def claim(self, name: str) -> Path:
        """The folder of a volume that pods share."""
        return self._folder / "claims" / name

    def start(self, pod_template: Mapping[str, Any], *, index: int = 0) -> Pod:
        """Start the only container of a pod template on the next host, which has the pod's name."""
        host = self._hosts[len(self.pods)]
        folder = self._folder / f"pod-{len(self.pods)}"
        (folder / "root").mkdir(parents=True)
        spec = pod_template["spec"]
        (container,) = spec["containers"]
        variables = variables_of(container, index)
        command = command_of(container, variables)
        user = spec["securityContext"]["runAsUser"]
        hosts_file = folder / "hosts"
        subdomain = spec.get("subdomain", "")
        hosts_file.write_text(_own_names(host, subdomain))
        mounts = [*self._software(), (str(hosts_file), "/etc/hosts"), (str(self._workspace), "/workspace")]
        mounts += self._volumes(spec, container, folder)
        if not container.get("securityContext", {}).get("readOnlyRootFilesystem"):
            temporary = folder / "tmp"  # of the image
            temporary.mkdir()
            temporary.chmod(0o1777)
            mounts.append((str(temporary), "/tmp"))
        # No name server is there to answer; torch asks for every host's name, again and again.
        environment = {"PATH": self.path, "HOSTNAME": host.name, "RES_OPTIONS": "timeout:1 attempts:1", **variables}
        environment |= {"OMP_NUM_THREADS": "1", "STEPSCOPE_HTML": "0"}
        words = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "sh", "-c", SETUP, "pod"]
        words += [str(folder / "root"), str(user)]
        words += [word for mount in mounts for word in mount]
        with (folder / "output.txt").open("wb") as output:
            process = host.start(
                [*words, "--", *command], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.pods.append(Pod(host.name, host, folder, process, subdomain))
        return self.pods[-1]

    def publish(self) -> None:
        """Let every pod resolve the names of all pods, as a headless service does. The newest pod of a name counts."""
        newest = {pod.name: pod for pod in self.pods}.values()
        names = "".join(
            f"{pod.host.address} {_full(pod.name, pod.subdomain)} {pod.name}.{pod.subdomain}\n" for pod in newest
        )
        for pod in self.pods:
            with (pod.folder / "hosts").open("w") as file:  # in place: it is mounted
                file.write(_own_names(pod.host, pod.subdomain) + names)

    def outputs(self) -> str:
        return "\n".join(f"--- {pod.name} {pod.host.address}\n{pod.output}" for pod in self.pods)

    @staticmethod
    def _software() -> list[tuple[str, str]]:
        """What an image would contain: this Python, its packages and ours."""
        folders = {sys.base_prefix, sys.prefix, str(ROOT / "src")}
        return [(folder, folder) for folder in sorted(folders) if not folder.startswith("/usr")]

    def _volumes(self, spec: Mapping[str, Any], container: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
        group = spec["securityContext"]["fsGroup"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        found = []
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                continue  # the 64 MiB that a container gets anyway must do
            place = folder / "volumes" / mount["name"]
            if "secret" in volume:
                self._write_secret(place, volume["secret"], group)
            else:
                if claim := volume.get("persistentVolumeClaim"):
                    place = self.claim(claim["claimName"])
                place.mkdir(parents=True, exist_ok=True)
                os.chown(place, 0, group)
                place.chmod(GROUP_MODES["emptyDir" if "emptyDir" in volume else "persistentVolumeClaim"])
            found.append((str(place), mount["mountPath"]))
        return found

    def _write_secret(self, place: Path, secret: Mapping[str, Any], group: int) -> None:
        """Links to files of root in a folder of their own, so that all change at once."""
        data = place / "..2026_11_18"
        data.mkdir(parents=True)
        (place / "..data").symlink_to(data.name)
        for item in secret["items"]:
            file = data / item["path"]
            file.write_text(self._secrets[item["key"]])
            os.chown(file, 0, group)
            file.chmod(secret["defaultMode"])
            (place / item["path"]).symlink_to(f"..data/{item['path']}")


def _own_names(host: Host, subdomain: str) -> str:
    """What a pod knows of itself before any name service does."""
    return f"127.0.0.1 localhost\n{host.address} {_full(host.name, subdomain)} {host.name}\n"


def _full(name: str, subdomain: str) -> str:
    return f"{name}.{subdomain}.default.svc.cluster.local"
