"""The files in `deploy/`: valid by published schemas, with flags, paths and ports that a server has."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
import yaml

from localllm.cli.fast_start import COMMAND_TABLE
from localllm.llm.llm import LLM
from localllm.server.access import make_access_policy
from localllm.server.serve import DRAIN_TIMEOUT_S
from tests.server.conftest import serving

DEPLOY = Path(__file__).parents[2] / "deploy"
COMMANDS = json.loads(COMMAND_TABLE.read_text(encoding="utf-8"))["commands"]
KUBERAY = DEPLOY / "kuberay.yaml"
MANIFESTS = [*sorted(DEPLOY.glob("kubernetes*.yaml")), KUBERAY]
COMMAND_LINE = re.compile(r"\blocalllm (?P<arguments>(?:serve|pull|cluster)\b[^;|>)\n]*)")


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def pod_templates(file: Path) -> list[dict[str, Any]]:
    found = []
    for each in documents(file):
        spec = each["spec"]
        groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if each["kind"] == "RayCluster" else [spec]
        found += [group["template"] for group in groups if "template" in group]
    return found


def pods(file: Path) -> list[dict[str, Any]]:
    return [template["spec"] for template in pod_templates(file)]


def containers() -> list[dict[str, Any]]:
    return [container for file in MANIFESTS for pod in pods(file) for container in pod["containers"]]


def scripts() -> list[str]:
    """The shell scripts of all files."""
    task = read("skypilot.yaml")
    in_pods = [container["args"][0] for container in containers() if "command" in container]
    return [task["setup"], task["run"], (DEPLOY / "build.sh").read_text(encoding="utf-8"), *in_pods]


def command_lines() -> list[list[str]]:
    """Arguments of localllm in all files."""
    lines = [container["args"] for container in containers() if "command" not in container]
    lines.append(read("compose.yaml")["services"]["localllm"]["command"])
    for text in scripts():
        joined = text.replace("\\\n", " ")
        lines += [shlex.split(match["arguments"], comments=True) for match in COMMAND_LINE.finditer(joined)]
    return lines


def options(command: str) -> dict[str, Any]:
    return COMMANDS[command]["options"]


def test_commands_and_flags_exist() -> None:
    lines = command_lines()
    assert sorted({line[0] for line in lines}) == ["cluster", "pull", "serve"]
    assert {line[1] for line in lines if line[0] == "cluster"} == {"start", "join", "status", "stop"}
    for command, *words in lines:
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= set(options(command)), (command, flags - set(options(command)))


def test_manifests_match_the_schemas_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the extra `test`")
    for file in MANIFESTS:
        pod_documents = [{"apiVersion": "v1", "kind": "Pod", **template} for template in pod_templates(file)]
        own = [
            document for document in documents(file) if document["kind"] != "RayCluster"
        ]  # which it does not know
        for document in (*own, *pod_documents):
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    broken = next(each for each in documents(DEPLOY / "kubernetes.yaml") if each["kind"] == "Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["httpGet"]["pat"] = "/"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


def test_the_ray_cluster_has_the_fields_of_kuberay() -> None:
    """By the reference of KubeRay 1.6, whose schema is in no package."""
    [cluster] = [each for each in documents(KUBERAY) if each["kind"] == "RayCluster"]
    assert cluster["apiVersion"] == "ray.io/v1" and cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["spec"].keys() == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    head, [workers] = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    assert head.keys() == {"rayStartParams", "template"}
    assert workers.keys() - head.keys() == {"groupName", "replicas", "minReplicas", "maxReplicas"}
    assert head["template"]["spec"]["containers"][0]["name"] == "ray-head"
    version = re.search(r'"ray\[serve\](?P<pin>[^"]*)"', (DEPLOY.parent / "pyproject.toml").read_text())
    assert version and cluster["spec"]["rayVersion"].startswith(re.findall(r"\d+\.\d+", version["pin"])[0])


def test_the_compose_file_matches_the_schema_of_compose() -> None:
    package = pytest.importorskip("check_jsonschema", reason="needs the extra `test`")
    schema = Path(package.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    validator = jsonschema.Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
    content = read("compose.yaml")
    assert not list(validator.iter_errors(content))
    content["services"]["localllm"]["port"] = ["11434"]
    assert list(validator.iter_errors(content))


def test_the_dockerfile_has_no_findings_of_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("needs the extra `test`")
    result = subprocess.run([hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_scripts_are_valid_shell() -> None:
    for script in scripts():
        result = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_the_script_says_that_docker_is_missing(tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    result = subprocess.run([DEPLOY / "build.sh"], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode == 2 and "docker is not installed" in result.stderr


def test_containers_have_the_least_rights() -> None:
    service = read("compose.yaml")["services"]["localllm"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for file in MANIFESTS:
        for pod in pods(file):
            context = pod["securityContext"]
            assert context["runAsNonRoot"] and not pod["automountServiceAccountToken"]
            assert f"useradd --uid {context['runAsUser']}" in (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    for container in containers():
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False


def test_the_builder_sends_what_the_package_needs() -> None:
    """The Dockerfile's ignore file leaves out all but these, so a new file of the build must be added to it."""
    sent = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    project = (DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8")
    needed = {
        "pyproject.toml",
        "localllm",
        *re.findall(r'^(?:readme|license-files) = \[?"([^"]+)"', project, re.M),
    }
    needed |= {name for name in ("man", "models.toml") if f'"{name}" = ' in project}
    assert needed <= sent and all((DEPLOY.parent / name).exists() for name in sent)


def test_running_answers_end_before_containers_are_killed() -> None:
    grace = int(read("compose.yaml")["services"]["localllm"]["stop_grace_period"].removesuffix("s"))
    assert grace > DRAIN_TIMEOUT_S
    assert all(pod["terminationGracePeriodSeconds"] > DRAIN_TIMEOUT_S for file in MANIFESTS for pod in pods(file))


def test_probes_and_ports_are_those_of_a_server(demo: LLM) -> None:
    """Every path that is probed answers without a key, on the port that is exposed."""
    port = options("serve")["--port"]["default"]
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert f"EXPOSE {port}" in dockerfile
    assert read("compose.yaml")["services"]["localllm"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    paths = set(re.findall(r"http://127\.0\.0\.1:(?:\d+)(/\w+)", dockerfile))
    for container in (each for each in containers() if "ports" in each):
        assert [each["containerPort"] for each in container["ports"]] == [port]
        if container["name"].startswith("ray-"):
            continue  # KubeRay adds its own
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            probed = container[probe].get("httpGet") or container[probe]["tcpSocket"]
            assert probed["port"] in [each["name"] for each in container["ports"]]
            paths |= {probed["path"]} if "path" in probed else set()
    services = [each for file in MANIFESTS for each in documents(file) if each["kind"] == "Service"]
    exposed = {each["name"]: each["port"] for service in services for each in service["spec"]["ports"]}
    assert exposed == {"http": port, "cluster": options("cluster")["--port"]["default"]}
    with serving(demo, make_access_policy("127.0.0.1", ["a-key-of-the-probes"])) as url:
        for path in paths:
            assert httpx2.get(f"{url}{path}").status_code == 200, path
        assert httpx2.get(f"{url}/metrics").status_code == 401
