"""`trefoil deploy env`: what it refuses, in one line, and what it writes; docker-compose.yml has its variables."""

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from tests.support.ports import free_ports
from trefoil.cli.deploy import machine as look
from trefoil.cli.deploy.env_file import GIVEN, render, values_of
from trefoil.cli.deploy.machine import SeenMachine, Wanted, check
from trefoil.cli.main import app
from trefoil.core.errors import TrefoilError

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "model_repository"
HERE = SeenMachine(
    cores=8, memory_gib=32.0, address="10.0.0.11", driver="550.54", gpus=2, engine="26.1", engine_trouble="",
    toolkit=True, compose="2.40.3",
)  # fmt: skip
NO_DRIVER = replace(HERE, driver="", gpus=0)


def given_ports() -> dict[str, str]:
    """Ports that nothing listens on, so that a machine that runs a system passes too."""
    names = [name for name in GIVEN if name.endswith("_PORT")]
    return dict(zip(names, map(str, free_ports(len(names))), strict=True))


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "_check_cpu_image", Mock())
    monkeypatch.setattr(look, "install_triton", Mock())


def values(wanted: Wanted, machine: SeenMachine = HERE) -> dict[str, str]:
    found = values_of(replace(wanted, given={**given_ports(), **wanted.given}), machine, str(ROOT))
    check(wanted, found, machine)
    return found


def test_the_compose_file_takes_these_variables_and_no_others() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    taken = dict(reversed(re.findall(r"\$\{(\w+):?-([^}]*)\}", text)))  # of several defaults the first
    assert set(taken) | {"COMPOSE_PROFILES"} == set(GIVEN)
    assert {name: GIVEN[name][0] for name in taken} == taken


def test_what_is_written_says_what_was_seen_and_comments_out_what_nobody_changed() -> None:
    wanted = Wanted(given={"TREFOIL_ZONE": "GB"})
    text = render(values_of(wanted, HERE, str(ROOT)), HERE)
    assert "#   8 cores, 32 GiB of memory, address 10.0.0.11\n#   driver 550.54, 2 GPUs; a container toolkit" in text
    assert "\nTREFOIL_ZONE=GB\n" in text
    assert "\n# TREFOIL_GRPC_PORT=8001\n" in text


def test_a_second_host_has_no_control_plane_and_says_where_it_is() -> None:
    found = values(Wanted("node", MODELS, "gpu8", redis_url="rediss://10.0.0.1:6379"), NO_DRIVER)
    assert (found["TREFOIL_CONTROL"], found["TREFOIL_NODE"], found["COMPOSE_PROFILES"]) == ("0", "gpu8", "node")
    assert (found["TREFOIL_ADVERTISE_HOST"], found["TREFOIL_NODE_BIND"]) == ("10.0.0.11", "0.0.0.0")


@pytest.mark.parametrize(
    ("wanted", "machine", "said"),
    [
        (Wanted(given={"TREFOIL_REDIS_PASSWORD": ""}), HERE, "TREFOIL_REDIS_PASSWORD = '': empty. Remedy: leave"),
        (Wanted("node", redis_url="rediss://:@h:6379"), HERE, r"REDIS_URL = 'rediss://\*\*\*': an empty password"),
        (Wanted("node", redis_url="rediss://:pw@h:6379"), HERE, r"REDIS_URL = 'rediss://\*\*\*': holds a password"),
        (Wanted("node", redis_url="redis://h:6379"), HERE, "TREFOIL_REDIS_URL = 'redis://h:6379': no address of"),
        (Wanted("node", redis_url="rediss://:pw@[h:6379"), HERE, r"TREFOIL_REDIS_URL = '\[h:6379': no address of"),
        (Wanted(image="debian"), HERE, "--image = 'debian': is of real GPUs. Remedy: leave it out"),
        (Wanted("node"), HERE, "TREFOIL_REDIS_URL = '': missing: the Redis of the first host"),
        (Wanted(), replace(HERE, compose="1.29.2"), "compose = '1.29.2': too old. Remedy: install Compose v2"),
        (Wanted(), replace(HERE, compose=""), "compose = '': neither"),
        (Wanted(), replace(HERE, engine_trouble="none at x. Remedy: start it"), "^none at x. Remedy: start it$"),
        (Wanted(models=Path("/not/there")), HERE, "TREFOIL_MODELS = '/not/there': no such model repository. Remedy: "),
        (Wanted("gpu"), NO_DRIVER, "--profile = 'gpu': no NVIDIA driver on this machine. Remedy: load it"),
        (Wanted("gpu"), replace(HERE, gpus=0), "--profile = 'gpu': driver 550.54 lists no GPU"),
        (Wanted("gpu"), replace(HERE, toolkit=False), "--profile = 'gpu': the engine knows neither NVIDIA's runtime"),
        (Wanted(given={"TREFOIL_GRPC_PORT": "http"}), HERE, "TREFOIL_GRPC_PORT = 'http': no port"),
    ],
)  # fmt: skip
def test_what_could_not_start_is_refused(wanted: Wanted, machine: SeenMachine, said: str) -> None:
    with pytest.raises(TrefoilError, match=said) as caught:
        values(wanted, machine)
    assert "pw" not in str(caught.value)


def test_a_taken_port_is_refused_unless_this_deployment_has_it() -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        port = door.getsockname()[1]
        wanted = Wanted(given={"TREFOIL_REST_PORT": str(port)})
        with pytest.raises(TrefoilError, match=f"TREFOIL_REST_PORT = '{port}': taken. Remedy: stop what listens"):
            values(wanted)
        values(wanted, replace(HERE, own_ports=(port,)))


def test_models_that_the_containers_cannot_read_are_refused(tmp_path: Path) -> None:
    family = tmp_path / "digits"
    family.mkdir()
    for name in ("family.toml", "profile.csv", "config.pbtxt"):
        (family / name).write_bytes((MODELS / "digits" / name).read_bytes())
    (family / "profile.csv").chmod(0o600)
    with pytest.raises(TrefoilError, match=r"cannot read digits/profile\.csv. Remedy: chmod -R o\+rX"):
        values(Wanted(models=tmp_path))


def test_an_image_without_a_triton_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(look, "Engine", Mock())
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'exec: python3: not found' >&2\nexit 127\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(TrefoilError, match=r"image = 'debian': no Triton in it \(exec: python3: not found\). Remedy: "):
        look._check_cpu_image("debian")


def test_what_was_written_and_seen_is_one_json_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "look", lambda _: HERE)
    monkeypatch.setattr(look, "check", Mock())
    done = CliRunner().invoke(app, ["deploy", "env", "--output", str(tmp_path / "env"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["machine"]["cores"] == 8
