"""docker-compose.yml: what docs/operations.md promises of users and secrets."""

from pathlib import Path

import pytest
import yaml

SERVICES = yaml.safe_load((Path(__file__).resolve().parents[2] / "docker-compose.yml").read_text())["services"]
READERS = {
    "authority": set(),
    "secrets": {"carbon_feed", "controller", "dispatcher_1", "dispatcher_2"},
    "secrets_controller": {"controller"},
    "secrets_agent": {"agent", "agent_gpu"},
    "secrets_redis": {"redis"},
    "secrets_haproxy": {"haproxy"},
    "secrets_grafana": {"grafana"},
}


@pytest.mark.parametrize("volume", READERS)
def test_secrets_are_read_by_those_who_need_them_and_written_by_their_maker(volume):
    mounts = {name: [text.split(":") for text in told.get("volumes", ())] for name, told in SERVICES.items()}
    found = {name: mount for name, all_ in mounts.items() for mount in all_ if mount[0] == volume}
    assert found.pop("secrets")[2:] == []
    assert found.keys() == READERS[volume]
    assert all(mount[2:] == ["ro"] for mount in found.values())


@pytest.mark.parametrize("name", SERVICES)
def test_only_the_agent_of_real_gpus_is_root(name):
    told = SERVICES[name]
    assert told["user"] == ("0:0" if name == "agent_gpu" else "10001:10001")
    assert told.get("cap_add", []) == (["SYS_ADMIN"] if name == "agent_gpu" else [])
    assert told["cap_drop"] == ["ALL"]
    assert told["security_opt"] == ["no-new-privileges:true"]
    assert told["read_only"]
    assert "privileged" not in told
