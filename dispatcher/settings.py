"""What the dispatcher can be told. Every bound has a name and a unit."""

from pydantic import Field, field_validator

from trefoil.runtime.config import ServiceSettings


class DispatcherSettings(ServiceSettings):
    """Settings of `python -m dispatcher`."""

    admin_address: str = "127.0.0.1:8104"
    metrics_address: str = "127.0.0.1:8114"
    inference_address: str = "127.0.0.1:8001"
    """host:port that clients talk KServe v2 to."""
    worker: int = Field(0, ge=0)
    """Number of this worker within its dispatcher."""
    message_bytes_max: int = Field(-1, ge=-1)
    """Largest request accepted; -1 = no limit (gRPC's own default of 4 MB refuses ordinary images)."""
    window_s: float = Field(0.5, gt=0)
    """How often a load window is flushed."""
    windows_pending_max: int = Field(120, ge=1)
    """Windows kept for Redis while it is away; older ones are dropped and counted."""
    ack_s: float = Field(1.0, gt=0)
    """How often the table is acknowledged, beyond every change of it."""
    no_slice_wait_s: float = Field(20.0, ge=0)
    """How long requests wait for a family that had a live slice and lost the last one."""
    probe_timeout_s: float = Field(3.0, gt=0)
    """How long a probe of an ejected slice may take; a dead python stub answers after 1 s."""
    node_stale_s: float = Field(5.0, gt=0)
    """Past this age of a node's status its slices are probed from here."""
    stale_probe_s: float = Field(2.0, gt=0)
    """How often slices of a node with a stale status are probed."""
    stale_probe_failures: int = Field(3, ge=1)
    """Failed probes in a row after which such a slice is ejected."""
    drain_s: float = Field(3.0, ge=0)
    """How long requests in flight may take once the process was told to stop."""
    classes_max: int = Field(16, ge=1)
    """Values of trefoil_class that are counted apart; the rest is "other"."""
    log_every_requests: int = Field(1000, ge=1)
    """One canonical log line every so many requests of a family."""
    log_failures_per_s: float = Field(5.0, ge=0)
    """Failed requests are all counted, and logged up to this rate."""

    @field_validator("message_bytes_max")
    @classmethod
    def _room_for_a_request(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 refuses every request; write -1 for no limit")
        return value
