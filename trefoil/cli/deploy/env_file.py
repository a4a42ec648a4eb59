"""The variables of docker-compose.yml: what each is, and its value on this machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trefoil.cli.deploy.machine import SeenMachine, Wanted
from trefoil.core.errors import SettingError

GIVEN: Final[Mapping[str, tuple[str, str]]] = {
    "COMPOSE_PROFILES": (
        "",
        "node: only node and agent; gpu: its GPUs; dashboards: Grafana; alerts: Alertmanager; with commas between",
    ),
    "TREFOIL_TAG": ("latest", "of Trefoil's images"),
    "TREFOIL_BASE": ("debian:bookworm-slim", "what images are built on"),
    "TREFOIL_BUILD_NETWORK": ("default", "host: where a build reaches the network only so"),
    "PIP_INDEX_URL": ("", "a mirror of the package index, for builds"),
    "TREFOIL_BIND": (
        "127.0.0.1",
        "address that clients and Prometheus' page listen on; 0.0.0.0: every one of this host",
    ),
    "TREFOIL_GRPC_PORT": ("8001", "KServe v2 over gRPC"),
    "TREFOIL_REST_PORT": ("8000", "KServe v2 over HTTP"),
    "TREFOIL_PROMETHEUS_PORT": ("9090", "Prometheus"),
    "TREFOIL_GRAFANA_PORT": ("3000", "Grafana, with the profile dashboards"),
    "TREFOIL_ALERTMANAGER_PORT": ("9093", "Alertmanager, with the profile alerts"),
    "TREFOIL_ALERT_WEBHOOK": ("", "URL that Alertmanager sends every alert to"),
    "TREFOIL_WATCHDOG_WEBHOOK": ("", "URL that it asks each minute: a service that reports when this ends"),
    "TREFOIL_CLUSTER": ("trefoil", "label `cluster` of what leaves Prometheus: alerts, remote write, federation"),
    "TREFOIL_REDIS_BIND": ("127.0.0.1", "address that Redis listens on; 0.0.0.0: nodes on other hosts join"),
    "TREFOIL_REDIS_PORT": ("6379", "Redis, over TLS"),
    "TREFOIL_REDIS_PASSWORD": (
        "unset",
        "drawn at the first up where it is `unset`; one that is given here shows in `docker inspect`",
    ),
    "TREFOIL_REDIS_URL": ("", "another host's Redis: rediss://HOST:PORT; its password comes with `secrets import`"),
    "TREFOIL_CONTROL": ("1", "0: no Redis, feed, controller, dispatchers here: a second host"),
    "TREFOIL_SIMULATED": ("1", "0: no simulated node here"),
    "TREFOIL_NODE": ("node0", "name of this node; no two have the same"),
    "TREFOIL_ADVERTISE_HOST": ("node", "how controller and dispatchers reach this node; `node`: on the same host"),
    "TREFOIL_NODE_BIND": ("127.0.0.1", "address that agent and Tritons listen on outside of the deployment's network"),
    "TREFOIL_TRITON_PORTS": ("8200", "ports of Tritons that other hosts reach"),
    "TREFOIL_TRITON_IMAGE": ("", "image with a Triton for real GPUs"),
    "TREFOIL_STATE": ("/var/lib/trefoil", "folder of this host that the agent of real GPUs keeps its state in"),
    "TREFOIL_DOCKER_GROUP": ("0", "group of the engine's socket"),
    "TREFOIL_GPU_RUNTIME": ("nvidia", "the engine's runtime that gives the agent the GPUs"),
    "TREFOIL_MODELS": ("./model_repository", "model repository"),
    "TREFOIL_SETTINGS": ("./settings", "folder of your own settings files, which no upgrade touches"),
    "TREFOIL_RENEW_S": ("86400", "how often certificates are looked at; each is renewed in its last 30 days"),
    "TREFOIL_ZONE": ("demo", "grid zone (trefoil carbon zones)"),
    "TREFOIL_CARBON_PROVIDER": ("trace", "who is asked (docs/carbon.md); trace: a synthetic day"),
    "TREFOIL_CARBON_SPEEDUP": ("12", "of the trace: a day passes in two hours"),
    "TREFOIL_MODE": ("act", "observe, advise or act"),
    "TREFOIL_LOG_SIZE": ("10m", "size at which a service's log is rotated; three files of it stay of each"),
    "TREFOIL_METRICS_KEPT": ("15d", "how long Prometheus keeps what it reads"),
}
"""Variable: what docker-compose.yml takes where it is not set, and what it means."""


def values_of(wanted: Wanted, machine: SeenMachine, here: str) -> dict[str, str]:
    """Value of every variable.

    Raises:
        SettingError: what is asked for does not fit together.
    """
    values = {name: default for name, (default, _) in GIVEN.items()}
    models = wanted.models if wanted.models.is_absolute() else Path(here) / wanted.models
    values |= {"TREFOIL_NODE": wanted.node, "TREFOIL_MODELS": str(models), "COMPOSE_PROFILES": wanted.profile}
    if wanted.profile:
        values |= {"TREFOIL_ADVERTISE_HOST": wanted.advertise_host or machine.address, "TREFOIL_NODE_BIND": "0.0.0.0"}
    if wanted.profile == "node":
        if not wanted.redis_url and not wanted.given.get("TREFOIL_REDIS_URL"):
            remedy = "--redis-url rediss://HOST:PORT of the first host"
            raise SettingError(
                "missing: the Redis of the first host", field="TREFOIL_REDIS_URL", value="", remedy=remedy
            )
        values |= {"TREFOIL_CONTROL": "0", "TREFOIL_TRITON_PORTS": "8200-8231"}
    if wanted.image and wanted.profile != "gpu":
        remedy = "leave it out, or add --profile gpu: simulated nodes run Trefoil's own image"
        raise SettingError("is of real GPUs", field="--image", value=wanted.image, remedy=remedy)
    if wanted.profile == "gpu":
        values |= {"TREFOIL_SIMULATED": "0", "TREFOIL_TRITON_IMAGE": wanted.image or NVIDIA}
        values["TREFOIL_DOCKER_GROUP"] = str(machine.docker_group)
    if wanted.redis_url:
        values["TREFOIL_REDIS_URL"] = wanted.redis_url
    return values | dict(wanted.given)


NVIDIA: Final = "nvcr.io/nvidia/tritonserver:24.10-py3"


def render(values: Mapping[str, str], machine: SeenMachine) -> str:
    """The file: what was seen, then each variable under what it means; what is as without it, commented out."""
    lines = [
        "# Of docker-compose.yml; written by `trefoil deploy env`, which saw here:",
        *(f"#   {line}" for line in machine.lines),
    ]
    for name, (default, meaning) in GIVEN.items():
        value = values[name]
        lines += ["", f"# {meaning}", f"{'# ' if value == default else ''}{name}={value}"]
    return "\n".join(lines) + "\n"
