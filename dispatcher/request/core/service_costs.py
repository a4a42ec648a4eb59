"""What requests cost their slices: the service time that like ones took lately, by which clients share a queue.

Data: dispatch-to-answer times of answered requests, by model and size (powers of two items).
Formulation: mean <- mean + ALPHA (seen - mean). A size that was never seen: in proportion to the nearest one that was;
    a model that never answered: UNKNOWN_S for each item.
Deviations: of whichever slice and variant: who waits has none yet.
"""

from typing import Final

ALPHA: Final = 0.1
SIZES: Final = 16  # 2**15 items and more are one size
UNKNOWN_S: Final = 0.01
LEAST_S: Final = 1e-6
MODELS_MAX: Final = 4096


class ServiceCosts:
    """Costs of requests of one worker [s]."""

    def __init__(self) -> None:
        self._means: dict[str, list[float]] = {}

    def record(self, model: str, items: int, service_s: float) -> None:
        """Record what an answer took."""
        sizes = self._means.get(model)
        if sizes is None:
            if len(self._means) >= MODELS_MAX:
                self._means.clear()
            sizes = self._means[model] = [0.0] * SIZES
        size = min(items.bit_length(), SIZES - 1)
        mean = sizes[size]
        sizes[size] = mean + ALPHA * (service_s - mean) if mean else max(LEAST_S, service_s)

    def expected_s(self, model: str, items: int) -> float:
        """Expected service time of a request."""
        sizes = self._means.get(model)
        if sizes is None:
            return UNKNOWN_S * max(1, items)
        size = min(items.bit_length(), SIZES - 1)
        mean = sizes[size]
        if mean:
            return mean
        nearest = min((other for other in range(SIZES) if sizes[other]), key=lambda other: abs(other - size))
        return sizes[nearest] * 2.0 ** (size - nearest)
