"""Settings of other zones, each a whole Trefoil: how their services are reached."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, SecretStr

from trefoil.core.errors import SettingError
from trefoil.runtime.config import Settings


class OtherZone(Settings):
    """Table of `[[other_zones]]`: a zone that is another Trefoil."""

    zone: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Its name, as jobs and its controller have it."""
    address: str = Field(pattern=r"^\S+:[0-9]{1,5}$")
    """host:port of the admin port of its controller, or of its dispatcher."""
    token: SecretStr | None = None
    """Token of that zone: a read token of its controller; of its dispatcher the token of a tenant with role `jobs`."""
    token_file: Path | None = None
    """Or the file that holds it."""
    tls_certificate: Path | None = None
    """PEM chain that is shown to that zone, signed by its authority; None: the service's own."""
    tls_key: Path | None = None
    """PEM key of it."""
    tls_ca: Path | None = None
    """PEM of that zone's authority; None: the service's own."""


class OfferingZone(OtherZone):
    """Table of the controller's `[[other_zones]]`."""

    families: tuple[str, ...] = ()
    """Families whose requests that zone may answer; none: it runs items of jobs alone."""


class ServingZone(OtherZone):
    """Table of the dispatcher's `[[other_zones]]`."""

    inference_address: str = Field(default="", pattern=r"^(\S+:[0-9]{1,5})?$")
    """host:port of its dispatcher's inference port; empty: no request is forwarded there. The token's tenant needs the
    role `infer`, too."""


def check_other_zones(peers: Sequence[OtherZone], home: str = "") -> None:
    """Check that peers are different zones, none of them the service's own.

    Raises:
        SettingError: naming the entry.
    """
    seen = {home: "this zone's own name"}
    for index, peer in enumerate(peers):
        if peer.zone in seen:
            remedy = "name each other zone once"
            raise SettingError(
                f"is {seen[peer.zone]}", field=f"other_zones.{index}.zone", value=peer.zone, remedy=remedy
            )
        seen[peer.zone] = f"other_zones.{index}.zone, too"
