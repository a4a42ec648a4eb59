"""Which accuracy floors (`trefoil_min_accuracy`) a family can keep now, and which it may keep soon.

Source: DESIGN section 5 (degrade by a named rung, say so); the knob is INFaaS's MinAccuracy.
Data: live and planned targets with the accuracies of their variants.
Decision: whether a request with a floor is served, waits or is refused.
Formulation: floor <= best live: served, by a target that is accurate enough. Else floor <= best planned: it waits for
    that slice, as requests wait for a family that has lost its last one. Else it is refused with the accuracies that
    are live. Targets count that get requests: with a weight, or any where none has one.
Deviations: while a slice swaps variants it may answer with either, so it promises the lower of the two. A variant whose
    accuracy is unknown promises none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trefoil.core.errors import Infeasible
from trefoil.core.fleet import SliceStatus
from trefoil.core.plan import RouteTarget

Accuracies = Mapping[tuple[str, str], float]  # by family and variant


@dataclass(frozen=True, slots=True)
class AccuracyReach:
    """The best accuracy that a family can give, now and by its plan."""

    live: float = 0.0
    planned: float = 0.0

    def check(self, family: str, floor: float) -> None:
        """Check that an accuracy floor is worth waiting for.

        Raises:
            Infeasible: nothing live is accurate enough, and nothing planned will be.
        """
        if floor > max(self.live, self.planned):
            raise self.refusal(family, floor)

    def refusal(self, family: str, floor: float) -> Infeasible:
        """Error for a floor that nothing reaches, which names the best that is live."""
        best = f"the best that is live is {self.live:g}" if self.live else "no live slice tells how accurate it is"
        return Infeasible(
            f"nothing serves {family} that accurately now: {best}",
            field="trefoil_min_accuracy",
            value=floor,
            remedy=f"ask for at most {self.live:g}" if self.live else "leave it out",
        )


def best_accuracy(targets: Sequence[RouteTarget]) -> float:
    """Highest accuracy among targets that get requests; 0 for none."""
    weighed = [target for target in targets if target.weight > 0]
    return max((target.accuracy for target in weighed or targets), default=0.0)


def with_guaranteed_accuracy(
    target: RouteTarget, family: str, status: SliceStatus, accuracies: Accuracies
) -> RouteTarget:
    """Lower a target's accuracy to what it keeps whichever of its hosted variants answers."""
    hosted = [h.variant for h in status.hosted if h.model == family and h.variant != target.variant]
    least = min((accuracies.get((family, variant), 0.0) for variant in hosted), default=target.accuracy)
    return replace(target, accuracy=least) if least < target.accuracy else target
