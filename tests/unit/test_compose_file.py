"""docker-compose.yml: what docs/howto/compose.md promises of users and secrets."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FILE = Path(__file__).resolve().parents[2] / "docker-compose.yml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]
READERS = {
    "authority": set(),
    "secrets": {"carbon_feed", "controller", "dispatcher_1", "dispatcher_2"},
    "secrets_controller": {"controller"},
    "secrets_agent": {"agent", "agent_gpu"},
    "secrets_redis": {"redis"},
    "secrets_redis_exporter": {"redis_exporter"},
    "secrets_haproxy": {"haproxy"},
    "secrets_grafana": {"grafana"},
}


@pytest.mark.parametrize("volume", READERS)
def test_secrets_are_read_by_those_who_need_them_and_written_by_their_maker(volume):
    mounts = {name: [text.split(":") for text in told.get("volumes", ())] for name, told in SERVICES.items()}
    found = {name: mount for name, all_ in mounts.items() for mount in all_ if mount[0] == volume}
    assert found.pop("secrets")[2:] == found.pop("renewal")[2:] == []
    assert found.keys() == READERS[volume]
    assert all(mount[2:] == ["ro"] for mount in found.values())


def test_the_image_has_each_folder_that_the_maker_of_secrets_writes_to():
    """A new volume takes its owner from there; without it root's, and `secrets` could not write."""
    targets = {volume.split(":")[1] for volume in SERVICES["secrets"]["volumes"]} - {"/etc/trefoil"}
    assert targets <= set(FILE.with_name("deploy").joinpath("Dockerfile").read_text().split())


@pytest.mark.parametrize("file", [FILE, FILE.with_name("deploy") / "swarm/trefoil.yml"], ids=["compose", "swarm"])
def test_the_log_of_every_service_is_bounded_by_one_setting(file):
    for name, told in yaml.safe_load(file.read_text())["services"].items():
        bound = {"max-size": "${TREFOIL_LOG_SIZE:-10m}", "max-file": "3"}
        assert told["logging"] == {"driver": "json-file", "options": bound}, name


@pytest.mark.parametrize("name", SERVICES)
def test_only_the_agent_of_real_gpus_is_root(name):
    told = SERVICES[name]
    assert told["user"] == ("0:0" if name == "agent_gpu" else "10001:10001")
    assert told.get("cap_add", []) == (["SYS_ADMIN"] if name == "agent_gpu" else [])
    assert told["cap_drop"] == ["ALL"]
    assert told["security_opt"] == ["no-new-privileges:true"]
    assert told["read_only"]
    assert "privileged" not in told


def test_the_project_has_a_name_and_its_variables_no_place_in_git():
    assert yaml.safe_load(FILE.read_text())["name"] == "trefoil"
    named = ["git", "check-ignore", ".env", "settings/controller.toml", "deploy/compose/tags/1.3.comes-by-upgrade.sh"]
    done = subprocess.run(named, cwd=FILE.parent, capture_output=True, text=True)
    assert done.stdout.split() == named[2:]


def test_a_host_that_joins_runs_its_node_alone():
    first = {
        name for name, told in SERVICES.items() if "TREFOIL_CONTROL" in str(told.get("scale")) or "profiles" in told
    }
    assert SERVICES.keys() - first == {"secrets", "node_network", "node", "agent"}


def test_services_read_settings_of_ones_own_over_those_that_ship():
    for name, told in SERVICES.items():
        mounts = told.get("volumes", ())
        if name not in ("secrets", "renewal") and "./deploy/compose:/etc/trefoil:ro" in mounts:
            assert "${TREFOIL_SETTINGS:-./settings}:/etc/trefoil.d:ro" in mounts, name
            if "python" in str(told["command"]):
                assert told["environment"]["TREFOIL_OVERRIDES"] == "/etc/trefoil.d", name


COMPOSE = shutil.which("docker-compose")


def composed(words, folder, **variables):
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    argv = [COMPOSE, "--env-file", os.devnull, "-f", str(FILE), *words]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(COMPOSE is None, reason="no docker-compose on PATH")
def test_a_tag_that_was_not_rolled_out_is_refused(tmp_path):
    done = composed(["up", "-d"], tmp_path, TREFOIL_TAG="1.3")
    assert "deploy/compose/tags/1.3.comes-by-upgrade.sh not found" in done.stderr


@pytest.mark.skipif(COMPOSE is None, reason="no docker-compose on PATH")
@pytest.mark.parametrize("profiles", [(), ("gpu", "dashboards", "node")])
def test_compose_takes_the_file_without_an_env_file(profiles, tmp_path):
    asked = [word for name in profiles for word in ("--profile", name)]
    done = composed([*asked, "config", "--services"], tmp_path)
    assert done.returncode == 0, done.stderr
    asked_for = {name for name, told in SERVICES.items() if not set(told.get("profiles", ())) - set(profiles)}
    assert asked_for == set(done.stdout.split())
