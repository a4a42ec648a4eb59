"""A channel to another zone: its certificates, also as they are renewed or end."""

import asyncio
import re

import grpc
import pytest

from tests.support.certificates import Authority
from tests.support.dispatching import until
from trefoil.core.errors import SettingError
from trefoil.runtime.clock import WallClock
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.security.other_zones import OtherZone
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.security.zone_channel import ZoneChannel
from trefoil.runtime.service import RenewalsComponent, renewals
from trefoil.runtime.telemetry import Metrics


class ZonesOf(ServiceSettings):
    """Settings of a service with other zones."""

    other_zones: tuple[OtherZone, ...] = ()


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


async def test_renewed_certificates_delay_no_call_and_end_none(authority):
    calls, answer = [], asyncio.Event()

    async def handle(request: bytes, _: grpc.aio.ServicerContext) -> bytes:
        calls.append(request)
        await (answer.wait() if request == b"slow" else asyncio.sleep(0))
        return request

    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(handle)}
    server, pair = grpc.aio.server(), authority.service("dispatcher")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("zone", handlers),))
    tls = Tls(pair.certificate, pair.key, authority.certificate)
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    own = authority.service("home")
    channel = ZoneChannel(OtherZone(zone="DE", address=f"127.0.0.1:{port}"), ServiceSettings(**own.settings(authority)))
    first = await channel.get()
    slow = asyncio.ensure_future(first.unary_unary("/zone/Ask")(b"slow"))
    await until(lambda: calls == [b"slow"])
    authority.service("renewed").copy_to(own)
    async with asyncio.timeout(3):
        again = await asyncio.gather(channel.get(), channel.get())
        assert again[0] is again[1] is not first
        assert await again[0].unary_unary("/zone/Ask")(b"quick") == b"quick"
    answer.set()
    assert await slow == b"slow"
    await channel.close()
    await server.stop(None)


async def test_certificates_for_another_zone_are_among_those_that_end_and_files_that_are_refused(tmp_path):
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    own, shown = ours.service("home"), theirs.client("home", hours=0.5)
    token = tmp_path / "token"
    token.write_text("of-zone")
    token.chmod(0o600)
    named = {"tls_certificate": shown.certificate, "tls_key": shown.key, "tls_ca": theirs.certificate}
    peers = [
        OtherZone(zone="DE", address="de.example:1", token_file=token, **named),
        OtherZone(zone="FR", address="fr.example:1"),  # by the service's own files
    ]
    settings, metrics = ZonesOf(other_zones=peers, **own.settings(ours)), Metrics("dispatcher")
    part = RenewalsComponent(*renewals(settings, Tls.of(settings), None, peers), WallClock(), metrics)

    def told(name: str) -> dict[str, float]:
        found = re.findall(rf'{name}{{.*(?:field|whose)="([^"]*)".*}} (.*)', metrics.text())
        return {label: float(value) for label, value in found}

    await part.init()
    ends = told("trefoil_tls_expiry_timestamp_seconds")
    assert ends.keys() == {"service", "zone DE"}
    left_s = {whose: end_s - WallClock().now_s() for whose, end_s in ends.items()}
    assert 0 < left_s["zone DE"] <= 1800 < left_s["service"], "of the client certificate, which serves no one"
    assert set(told("trefoil_changed_file_refused").values()) == {0.0}
    shown.key.write_text("no key")
    token.chmod(0o644)
    part._look()
    assert told("trefoil_changed_file_refused") == {"token_file": 1.0, "tls_certificate, tls_key, tls_ca": 1.0}


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (("tls_certificate", "tls_ca"), "tls_certificate, tls_key: only one of the two is set. Remedy: set both"),
        (("tls_key", "tls_ca"), "tls_certificate, tls_key: only one of the two is set. Remedy: set both"),
        (
            ("tls_certificate", "tls_key"),
            "other_zones.tls_ca: no authority is named, so zone DE would be called in clear",
        ),
    ],
)
def test_half_of_the_files_for_a_zone_is_refused(authority, named, says):
    pair = authority.client("home")
    files = {"tls_certificate": pair.certificate, "tls_key": pair.key, "tls_ca": authority.certificate}
    peer = OtherZone(zone="DE", address="127.0.0.1:1", **{name: files[name] for name in named})
    with pytest.raises(SettingError, match=says):
        ZoneChannel(peer, ServiceSettings())
