"""Channel to a service of another zone."""

import asyncio
from typing import Final

import grpc

from trefoil.core.errors import SettingError
from trefoil.runtime import rpc
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.security.other_zones import OtherZone
from trefoil.runtime.security.tls import Loaded, Tls

CLOSE_S: Final = 5.0


def zone_tls(peer: OtherZone, own: ServiceSettings, address: str) -> Tls | None:
    """TLS to an address of a peer, by files of the service where the peer's table names none; None: clear text.

    Raises:
        SettingError: no address, certificates that cannot be used, or a token that would leave in clear text.
    """
    pair, ca = (peer.tls_certificate, peer.tls_key), peer.tls_ca or own.tls_ca
    if pair == (None, None):
        pair = own.tls_certificate, own.tls_key
    elif ca is None:
        why, remedy = f"no authority is named, so zone {peer.zone} would be called in clear text", "set it, too"
        raise SettingError(why, field="other_zones.tls_ca", remedy=remedy)
    tls = None if ca is None else Tls(*pair, ca, serves=False)
    rpc.split_address(address)
    rpc.check_clear_text(address, peer.token, tls, insecure=own.insecure)
    return tls


class ZoneChannel:
    """Channel to a peer's service, made again by renewed certificates."""

    def __init__(self, peer: OtherZone, own: ServiceSettings) -> None:
        """Raises SettingError: as `zone_tls`."""
        self.zone, self._address, self._insecure = peer.zone, peer.address, own.insecure
        self._token = peer.token
        self._tls = zone_tls(peer, own, peer.address)
        self._made: tuple[grpc.aio.Channel, Loaded | None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self) -> grpc.aio.Channel:
        """Channel of now. Calls on the one before may end, and delay none on this one."""
        loaded = None if self._tls is None else self._tls.now
        if self._made is None or self._made[1] is not loaded:
            made = rpc.channel(self._address, tls=self._tls, token=self._token, insecure=self._insecure)
            self._close_soon()
            self._made = made, loaded
        return self._made[0]

    async def close(self) -> None:
        """Close it; calls under way may end."""
        self._close_soon()
        await asyncio.gather(*self._closing)

    def _close_soon(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            task = asyncio.create_task(made[0].close(CLOSE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
