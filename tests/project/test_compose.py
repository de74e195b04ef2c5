"""deploy/compose: the files hold together, and what they start is what Specpilot and SGLang take.

Docker itself is asked only where there is one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from specpilot.controller.cli import parser
from specpilot.controller.config import Config, load_config
from specpilot.controller.launch.sglang_arguments import additions, candidate_steps, given, unsteerable
from specpilot.sglang_hooks.connection import socket_path
from specpilot.sglang_hooks.contract import TESTED_VERSIONS
from specpilot.sglang_hooks.settings import Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "compose"
VALUES = {"MODEL": "target", "DRAFT": "draft"}
"""What an operator sets."""

Service = dict[str, Any]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file, with its variables filled in."""

    def fill(found: re.Match[str]) -> str:
        name, rest = found.groups()
        if rest.startswith(":?"):
            return VALUES[name]
        assert rest.startswith(":-"), f"{name}: neither a default nor required"
        return rest.removeprefix(":-")

    text = re.sub(r"\$\{(\w+)([^}]*)\}", fill, (FOLDER / "compose.yaml").read_text())
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.fixture(scope="module")
def server(compose: dict[str, Any]) -> Service:
    found: Service = compose["services"]["server"]
    return found


@pytest.fixture(scope="module")
def sidecar(compose: dict[str, Any]) -> Service:
    found: Service = compose["services"]["controller"]
    return found


def mounts(service: Service) -> dict[str, str]:
    """What lies where: volume or file by the path in the container."""
    return {path: source for source, path, *_ in (volume.split(":") for volume in service["volumes"])}


def volume_of(service: Service, path: Path) -> str:
    """The volume that holds a path of the container."""
    return next(mounts(service)[str(place)] for place in path.parents if str(place) in mounts(service))


def config(sidecar: Service) -> Config:
    """The configuration that the sidecar starts with."""
    options = parser().parse_args(sidecar["command"][1:])
    return load_config(FOLDER / mounts(sidecar)[str(options.config)])


def test_it_follows_the_compose_specification(compose: dict[str, Any]) -> None:
    schema = json.loads((files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
    jsonschema.validate(compose, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**compose, "services": {"server": {"image": "x", "prots": []}}}, schema)


def test_both_meet_at_one_socket(compose: dict[str, Any], server: Service, sidecar: Service) -> None:
    endpoint = server["environment"]["SPECPILOT_ENDPOINT"]
    assert endpoint == sidecar["environment"]["SPECPILOT_ENDPOINT"] == config(sidecar).controller.endpoint
    shared = volume_of(server, socket_path(endpoint))
    assert shared == volume_of(sidecar, socket_path(endpoint))
    options = compose["volumes"][shared]["driver_opts"]
    user, group = server["user"].split(":")
    assert server["user"] == sidecar["user"]
    assert {"mode=0700", f"uid={user}", f"gid={group}"} <= set(options["o"].split(","))


def test_every_mount_is_there(compose: dict[str, Any], server: Service, sidecar: Service) -> None:
    named = {source for service in (server, sidecar) for source in mounts(service).values()}
    volumes = {source for source in named if not source.startswith(".")}
    assert volumes == set(compose["volumes"])
    assert all((FOLDER / source).is_file() for source in named - volumes)


def test_what_the_controller_writes_lies_in_volumes(sidecar: Service) -> None:
    own = config(sidecar)
    places = [volume_of(sidecar, Path(folder) / "x") for folder in (own.trace.directory, own.prior.directory)]
    assert places == ["trace", "prior"]
    assert sidecar["read_only"]


def test_ports_are_published_on_loopback_alone(compose: dict[str, Any], server: Service, sidecar: Service) -> None:
    for service in compose["services"].values():
        assert service["ports"]
        for port in service["ports"]:
            assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port)
    own = config(sidecar).web
    host, port = own.address
    assert host == "0.0.0.0"  # else Docker cannot reach it in there
    assert sidecar["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert Path(own.token_file).parent == Path("/run/secrets")
    assert sidecar["secrets"] == [Path(own.token_file).name]
    assert compose["secrets"].keys() == {*sidecar["secrets"]}


def test_sglang_takes_the_servers_arguments_and_can_be_steered(server: Service) -> None:
    assert server["command"][:3] == ["python3", "-m", "sglang.launch_server"]
    options = given(server["command"][3:])
    assert (options["model_path"], options["speculative_draft_model_path"]) == ("target", "draft")
    assert unsteerable(options) == []
    file = FOLDER / mounts(server)[options["speculative_adaptive_config"]]
    assert 0 in candidate_steps(file)
    # Nothing is missing that `specpilot launch` would add.
    assert additions({**options, "speculative_adaptive_config": str(file)}, [], Path("unused")) == []
    assert server["ports"] == [f"127.0.0.1:{options['port']}:{options['port']}"]
    assert f"http://127.0.0.1:{options['port']}/health" in server["healthcheck"]["test"]


def test_every_variable_is_an_option(server: Service, sidecar: Service) -> None:
    for service in (server, sidecar):
        environment = {name: str(value) for name, value in service["environment"].items()}
        assert Settings.from_environment(environment).endpoint
    assert Settings.from_environment(server["environment"]).server_id


def test_the_sidecar_is_asked_with_a_command_of_its_own(sidecar: Service) -> None:
    word, program, *arguments = sidecar["healthcheck"]["test"]
    assert (word, program) == ("CMD", "specpilot")
    assert parser().parse_args(arguments).run.__module__ == "specpilot.controller.client.status"


def test_both_start_again(server: Service, sidecar: Service) -> None:
    assert server["restart"] == sidecar["restart"] == "unless-stopped"
    assert server["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"


def test_the_images_hold_one_version_and_a_tested_sglang(server: Service, sidecar: Service) -> None:
    text = (FOLDER / "Dockerfile").read_text()
    assert re.findall(r"^ARG SPECPILOT=(.+)$", text, re.MULTILINE) == ["/checkout"]
    assert re.findall(r"^FROM lmsysorg/sglang:v(\S+) AS server$", text, re.MULTILINE)[0] in TESTED_VERSIONS
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert stages == [server["build"]["target"], sidecar["build"]["target"]]
    assert text.count('COPY . /checkout\nRUN pip install --no-cache-dir "$SPECPILOT"\n') == len(stages)
    for build in (server["build"], sidecar["build"]):
        assert (FOLDER / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).samefile(FOLDER / "Dockerfile")
    kept = re.findall(r"^!(\S+)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    needed = {path.name for path in (ROOT / "specpilot").iterdir() if path.is_symlink() and path.is_dir()}
    assert {*kept} == needed | {"specpilot", "pyproject.toml", "README.md", "LICENSE"}


def test_docker_reads_it() -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("no docker compose here")
    command = ["docker", "compose", "--file", str(FOLDER / "compose.yaml"), "config", "--quiet"]
    subprocess.run(command, check=True, env={**os.environ, **VALUES}, timeout=60)
