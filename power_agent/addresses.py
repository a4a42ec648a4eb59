"""Addresses that a node publishes: refused at the start where they lead nowhere from another host."""

import ipaddress
import socket
from urllib.parse import urlsplit

import structlog

from power_agent.settings import PowerAgentSettings
from trefoil.core.errors import SettingError
from trefoil.runtime.rpc import is_loopback, split_address


def check_addresses(settings: PowerAgentSettings) -> None:
    """Check what is published of agent and Tritons. Who reads it is where Redis is, or further away.

    Raises:
        SettingError: loopback or a wildcard is published while Redis is on another host, or a host while only loopback
            is listened on. Also if others reach Tritons that have neither TLS nor `insecure`.
    """
    away = _other_host(settings.redis_url.get_secret_value())
    advertised = settings.advertise_host
    for field, address in (("admin_address", settings.admin_address), ("triton_listen", f"{settings.triton_listen}:0")):
        value = getattr(settings, field)
        published = f"{advertised}:0" if advertised else address
        if _leads_to_oneself(published):
            if away:
                raise SettingError(
                    f"published to other hosts, for Redis is at {away}, and there it leads to themselves",
                    field="advertise_host" if advertised else field,
                    value=advertised or value,
                    remedy="set advertise_host to a name or address at which controller and dispatchers reach it",
                )
        elif is_loopback(address):
            raise SettingError(
                f"published as {advertised}, where it does not listen",
                field=field,
                value=value,
                remedy="listen on 0.0.0.0 or on that address, or drop advertise_host",
            )
    if not is_loopback(f"{settings.triton_listen}:0") and settings.tls_ca is None:
        if not settings.insecure:
            raise SettingError(
                "Tritons would speak clear text and answer any caller",
                field="triton_listen",
                value=settings.triton_listen,
                remedy="set tls_ca, keep 127.0.0.1, or give --insecure where only dispatchers reach that address",
            )
        structlog.get_logger().warning("anyone who reaches Tritons may ask them", triton_listen=settings.triton_listen)
    if settings.token is None and settings.runtime_name not in ("docker", "kubernetes"):
        why = "models run as processes of this machine, and every process on it could command this agent"
        structlog.get_logger().warning("no token is asked for", why=why, remedy="set token_file, also on loopback")


def _leads_to_oneself(address: str) -> bool:
    """Whether this address means the caller's own machine."""
    if is_loopback(address):
        return True
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _other_host(redis_url: str) -> str:
    """Host of Redis, or of one of its Sentinels, that is not this machine; "" where none is."""
    try:
        url = urlsplit(redis_url)
        hosts = [urlsplit(f"//{each}").hostname for each in url.netloc.rpartition("@")[2].split(",")]
    except ValueError:
        return ""  # not a URL: the connection reports it
    return "" if url.scheme == "unix" else next((host for host in hosts if host and _is_other(host)), "")


def _is_other(host: str) -> bool:
    """Whether a host is not this machine."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return True  # a name that does not resolve is none of this machine
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)  # only own addresses can be bound
            except OSError:
                continue
            return False
    return True
