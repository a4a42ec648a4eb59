"""What requests cost their slices: the service time that like ones took lately, by which clients share a queue.

Data: dispatch-to-answer times of requests, by model and size (powers of two items): of each client (tenant, or host)
    those that were executed, answered or not, and of all together those that were answered.
Formulation: mean <- mean + ALPHA (seen - mean). That of all counts, unless the client's own is more than LIKE times it
    or less than a LIKEth of it: what takes long need not be large. A size that was never seen: in proportion to the
    nearest one that was; a model that never answered: UNKNOWN_S for each item.
Deviations: of whichever slice and variant: who waits has none yet.
"""

from typing import Final

ALPHA: Final = 0.1
SIZES: Final = 16  # 2**15 items and more are one size
UNKNOWN_S: Final = 0.01
LEAST_S: Final = 1e-6
LIKE: Final = 1.5  # what differs by less is chance: shares are as exact as all requests are many
MEANS_MAX: Final = 4096  # of models and clients; the oldest go


class ServiceCosts:
    """Costs of requests of one worker [s]."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, str], list[float]] = {}

    def record(self, model: str, items: int, service_s: float, client: str = "") -> None:
        """Record what a request took: one of a client, or of all."""
        sizes = self._means.get((model, client))
        if sizes is None:
            if len(self._means) >= MEANS_MAX:
                del self._means[next(iter(self._means))]
            sizes = self._means[model, client] = [0.0] * SIZES
        size = min(items.bit_length(), SIZES - 1)
        mean = sizes[size]
        sizes[size] = mean + ALPHA * (service_s - mean) if mean else max(LEAST_S, service_s)

    def expected_s(self, model: str, items: int, client: str = "") -> float:
        """Expected service time of a request of a client."""
        size = min(items.bit_length(), SIZES - 1)
        own, sizes = self._means.get((model, client)), self._means.get((model, ""))
        whole_s, own_s = sizes[size] if sizes is not None else 0.0, own[size] if own is not None else 0.0
        if own_s and not own_s / LIKE <= whole_s <= own_s * LIKE:
            return own_s
        if whole_s:
            return whole_s
        sizes = sizes or own
        if sizes is None:
            return UNKNOWN_S * max(1, items)
        nearest = min((other for other in range(SIZES) if sizes[other]), key=lambda other: abs(other - size))
        return sizes[nearest] * 2.0 ** (size - nearest)
