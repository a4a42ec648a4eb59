"""What an agent has of its Tritons: keys that survive it, and a certificate that is none of its own."""

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from power_agent.addresses import check_addresses
from power_agent.settings import PowerAgentSettings
from power_agent.triton import access as access_module
from power_agent.triton.access import TritonAccess
from tests.support.certificates import Authority
from trefoil.core.errors import SettingError
from trefoil.runtime.clock import WallClock
from trefoil.runtime.files import replace_file
from trefoil.runtime.security.tls import Tls


def access_of(settings: PowerAgentSettings) -> TritonAccess:
    return TritonAccess(settings, Tls.of(settings))


def test_a_key_is_one_starts_own_and_survives_the_agent(tmp_path: Path) -> None:
    one, other = (access_of(PowerAgentSettings(state_dir=tmp_path / name)) for name in ("one", "other"))
    key = one.key("node0-gpu0-7g.40gb-0.g1")
    assert len({key, one.key("node0-gpu0-7g.40gb-0.g2"), other.key("node0-gpu0-7g.40gb-0.g1")}) == 3
    assert access_of(PowerAgentSettings(state_dir=tmp_path / "one")).key("node0-gpu0-7g.40gb-0.g1") == key
    assert (tmp_path / "one" / "triton.key").stat().st_mode & 0o777 == 0o600
    assert one.files("any") is None


def test_slices_that_start_together_have_keys_of_one_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is prepared in a separate thread; the successor of this agent knows what is in the file alone."""

    def slowly(path: Path, content: bytes, **how: Any) -> None:
        time.sleep(0.02)
        replace_file(path, content, **how)

    monkeypatch.setattr(access_module, "replace_file", slowly)
    settings, tags = PowerAgentSettings(state_dir=tmp_path), [f"slice{i}.g1" for i in range(8)]
    with ThreadPoolExecutor(len(tags)) as threads:
        keys = list(threads.map(access_of(settings).key, tags))
    assert keys == [access_of(settings).key(tag) for tag in tags]


SPOILT = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(b"abc"),
    "endless": lambda path: os.truncate(path, 2**40),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_secret_stands_aside_for_a_new_one(tmp_path: Path, name: str) -> None:
    settings, path = PowerAgentSettings(state_dir=tmp_path), tmp_path / "triton.key"
    before = access_of(settings).key("tag")
    SPOILT[name](path)
    after = access_of(settings).key("tag")
    assert after == access_of(settings).key("tag") != before
    assert (path.stat().st_size, (tmp_path / "triton.key.bad").exists()) == (32, True)


OPEN = {"triton_listen": "0.0.0.0", "advertise_host": "192.0.2.1"}


def test_a_nodes_certificates_name_it_and_its_tritons_have_one_of_their_own(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    own, tritons = ours.service("node7"), ours.server("tritons.node7")
    shown = {"triton_tls_certificate": tritons.certificate, "triton_tls_key": tritons.key}
    right = {"node": "node7", "state_dir": tmp_path / "state", **own.settings(ours), **shown}
    access = access_of(PowerAgentSettings(**right))
    access.write("slice")
    files = access.files("slice")
    assert files is not None
    assert files.key.read_bytes() == tritons.key.read_bytes()
    assert files.key.parent.parent.stat().st_mode & 0o777 == 0o700, "others of this host stay out"
    assert 0 < access.end_s(["slice"]) - WallClock().now_s() < 3601
    assert access.end_s(["slice", "of an agent that is gone"]) == 0
    assert access.end_s([]) == math.inf
    check_addresses(PowerAgentSettings(**right, admin_address="0.0.0.0:8103", **OPEN))
    renamed = {"agent_tls_name": "{node}.gpus", "triton_tls_name": "{node}.tritons"}
    theirs, shown_there = ours.service("node7.gpus"), ours.server("node7.tritons")
    pair = {"triton_tls_certificate": shown_there.certificate, "triton_tls_key": shown_there.key}
    others = {**right, **pair, **theirs.settings(ours), **renamed}
    assert access_of(PowerAgentSettings(**others)).name == "node7.tritons"
    elsewhere = ours.server("tritons.node8")
    for wrong, said in (
        ({"node": "node8"}, r"tls_certificate = .*node7\.crt'.*not name node8, but node7.*DNS:node8"),
        (
            {
                **dict.fromkeys(shown),
            },
            r"triton_tls_certificate, triton_tls_key: missing.*DNS:tritons\.node7",
        ),
        (
            {"triton_tls_certificate": elsewhere.certificate, "triton_tls_key": elsewhere.key},
            r"triton_tls_certificate = .*not name tritons\.node7, but tritons\.node8",
        ),
        (renamed, r"tls_certificate = .*not name node7\.gpus, but node7"),
        ({"triton_tls_name": "{node}"}, r"triton_tls_name = 'node7': is agent_tls_name\. Remedy: give Tritons another"),
        (dict.fromkeys(own.settings(ours)), "triton_tls_certificate: set without tls_ca"),
    ):
        with pytest.raises(SettingError, match=said):
            access_of(PowerAgentSettings(**{**right, **wrong}))
