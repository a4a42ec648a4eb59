"""What a node publishes leads to it, also from another host, or its agent does not start."""

from pathlib import Path
from typing import Any

import pytest

from power_agent.__main__ import build
from power_agent.addresses import check_addresses
from power_agent.settings import PowerAgentSettings
from trefoil.core.errors import SettingError

AWAY = "redis://:hunter2@203.0.113.9:6379/0"
REMEDY = "Remedy: set advertise_host to a name or address at which controller and dispatchers reach it"


def settings(**given: Any) -> PowerAgentSettings:
    return PowerAgentSettings(**given)


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ({}, "127.0.0.1:8103"),
        ({"advertise_host": "gpu7.example", "admin_address": "0.0.0.0:8103"}, "gpu7.example:8103"),
        ({"advertise_host": "fd00::7", "admin_address": "[::]:9"}, "[fd00::7]:9"),
        ({"admin_address": "unix:/run/agent.sock", "advertise_host": "localhost"}, "unix:/run/agent.sock"),
    ],
)
def test_the_agent_publishes_the_advertised_host_with_its_port(given: dict[str, Any], target: str) -> None:
    assert settings(**given).agent_target == target


OPEN = {"admin_address": "0.0.0.0:8103", "triton_listen": "0.0.0.0", "insecure": True}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "admin_address = '127.0.0.1:8103'"),
        ({"admin_address": "0.0.0.0:8103"}, "admin_address = '0.0.0.0:8103'"),
        ({"admin_address": "unix:/run/agent.sock"}, "admin_address = 'unix:/run/agent.sock'"),
        ({"admin_address": "10.0.0.7:8103"}, "triton_listen = '127.0.0.1'"),
        ({**OPEN, "advertise_host": "localhost"}, "advertise_host = 'localhost'"),
        ({**OPEN, "advertise_host": "0.0.0.0"}, "advertise_host = '0.0.0.0'"),
        ({**OPEN, "advertise_host": "::"}, r"advertise_host = '\[::\]'"),
    ],
)
def test_what_leads_other_hosts_to_themselves_is_refused_while_redis_is_on_another(
    given: dict[str, Any], named: str
) -> None:
    with pytest.raises(SettingError, match=rf"{named}: published .* Redis is at 203\.0\.113\.9.*{REMEDY}") as caught:
        check_addresses(settings(redis_url=AWAY, **given))
    assert "hunter2" not in str(caught.value)
    for here in (
        "redis://127.0.0.1:6379",
        "redis://127.0.0.2",
        "redis://localhost",
        "redis://[",
        "unix:///run/redis.sock",
    ):
        if "advertise_host" not in given:
            check_addresses(settings(redis_url=here, **given))


def test_what_listens_on_loopback_alone_is_not_advertised_elsewhere() -> None:
    with pytest.raises(SettingError, match=r"triton_listen = '127\.0\.0\.1': published as gpu7.*Remedy: .*0\.0\.0\.0"):
        check_addresses(settings(**OPEN | {"triton_listen": "127.0.0.1", "advertise_host": "gpu7"}))
    with pytest.raises(SettingError, match=r"admin_address = '127\.0\.0\.1:8103': published as gpu7"):
        check_addresses(settings(**OPEN | {"admin_address": "127.0.0.1:8103", "advertise_host": "gpu7"}))
    check_addresses(settings(redis_url=AWAY, advertise_host="gpu7", **OPEN))


def test_tritons_that_others_reach_need_a_word_for_it() -> None:
    with pytest.raises(SettingError, match=r"triton_listen = '0\.0\.0\.0': .*clear text.*--insecure"):
        check_addresses(settings(**OPEN | {"insecure": False, "advertise_host": "gpu7"}))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("advertise_host", "10.0.0.7:8103", "without a port"),
        ("advertise_host", "http://gpu7", "without a port"),
        ("triton_listen", "gpu7", "IPv4 address"),
        ("triton_listen", "::", "IPv4 address"),
    ],
)
def test_what_is_no_host_is_named(field: str, value: str, said: str) -> None:
    with pytest.raises(SettingError, match=rf"{field} = .*{said}"):
        settings(**{field: value})


def test_an_agent_that_nobody_would_reach_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="admin_address"):
        build(["--set", f"redis_url={AWAY}", "--set", f"state_dir={tmp_path / 'agent'}"])
    assert not (tmp_path / "agent").exists()
