"""Variants on trial: a canary's share of the traffic, a mirror's slices, which requests are copied, what copies tell.

Source: ours; the words are those of progressive delivery (canary analysis, traffic mirroring).
Data: a route's params `canary_version`, `canary_share`, `mirror_version`, `mirror_share`; its live targets.
Decision: weights; the targets that only get copies; per request, whether it is copied; per pair of answers, whether
    they agree.
Formulation: the canary's targets share canary_share in proportion to their weights (equally, if they have none), all
    others the rest as planned: a plan whose shares a rollout changes, or slices that die, change nothing about it.
    A mirror's targets answer nobody, whatever they weigh in a rollout. Both hold as long as other targets are live: any
    answer is better than none. Copied is who has frac(id * golden ratio) < share: as even as a counter, and in step
    with no round robin.
    Two answers agree on an item if all outputs do: floats of two dimensions by their largest element, all else exactly.
Deviations: the canary's share binds under `weighted` alone; routers that follow load take it as they take all weights.
    Nobody's floor is kept by a canary: what is on trial promises nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from trefoil.core.plan import Route, RouteTarget

GOLDEN: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
SPACE: Final = 2**64
FLOATS: Final[Mapping[str, str]] = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}


@dataclass(frozen=True, slots=True)
class Mirror:
    """Who gets copies of which share of a family's requests."""

    version: int
    share: float
    targets: tuple[RouteTarget, ...]

    def copies(self, id_: int) -> bool:
        """Whether this request is copied."""
        return (id_ * GOLDEN) % SPACE < self.share * SPACE


def routed(route: Route, live: Sequence[RouteTarget]) -> list[RouteTarget]:
    """The live targets that answer clients, by the weights that they are to have."""
    copied = mirror(route, live)
    serving = [target for target in live if copied is None or target.version != copied.version] or list(live)
    version, share = int(route.params.get("canary_version", 0)), route.params.get("canary_share", 0.0)
    canary = [target for target in serving if version and target.version == version]
    rest = [target for target in serving if not version or target.version != version]
    if not canary or not rest:
        return serving
    shares = {target.slice: share * part for target, part in zip(canary, _parts(canary), strict=True)}
    shares |= {target.slice: (1 - share) * part for target, part in zip(rest, _parts(rest), strict=True)}
    return [replace(t, weight=shares[t.slice], accuracy=0.0 if t.version == version else t.accuracy) for t in serving]


def mirror(route: Route, live: Sequence[RouteTarget]) -> Mirror | None:
    """Who gets copies, if anybody does."""
    version, share = int(route.params.get("mirror_version", 0)), route.params.get("mirror_share", 0.0)
    targets = tuple(target for target in live if version and target.version == version)
    return Mirror(version, share, targets) if targets and share > 0 else None


def _parts(targets: Sequence[RouteTarget]) -> list[float]:
    total = sum(target.weight for target in targets)
    return [target.weight / total if total > 0 else 1.0 / len(targets) for target in targets]


# --- what copies tell -------------------------------------------------------------------------------------------------


def agreement(answer: Any, copy: Any) -> tuple[int, int]:
    """(items on which two ModelInferResponses agree, items). Outputs are paired by name; one that lacks agrees on none.

    Tensors are read from raw_output_contents, as Triton sends them; others are compared as whole messages.
    """
    items = max((int(tensor.shape[0]) for tensor in answer.outputs if tensor.shape), default=1)
    agreed = np.ones(max(items, 1), dtype=bool)
    theirs = {tensor.name: at for at, tensor in enumerate(copy.outputs)}
    for at, tensor in enumerate(answer.outputs):
        other = theirs.get(tensor.name)
        if other is None or _kind(copy.outputs[other]) != _kind(tensor):
            agreed[:] = False
        elif at < len(answer.raw_output_contents) and other < len(copy.raw_output_contents):
            agreed &= _same(tensor, answer.raw_output_contents[at], copy.raw_output_contents[other], len(agreed))
        else:
            agreed &= tensor == copy.outputs[other]
    return int(agreed.sum()), len(agreed)


def _kind(tensor: Any) -> tuple[str, tuple[int, ...]]:
    return tensor.datatype, tuple(tensor.shape)


def _same(tensor: Any, ours: bytes, theirs: bytes, items: int) -> Any:
    """Per item (bool[items]) whether two raw tensors of one shape agree."""
    dtype, shape = FLOATS.get(tensor.datatype), tuple(tensor.shape)
    if len(ours) != len(theirs) or not shape or shape[0] != items or not ours:
        return ours == theirs
    if dtype is not None and len(shape) == 2 and shape[1] > 1:
        a, b = (np.frombuffer(raw, dtype).reshape(shape).argmax(axis=1) for raw in (ours, theirs))
        return a == b
    if len(ours) % items or tensor.datatype == "BYTES":
        return ours == theirs
    a, b = (np.frombuffer(raw, np.uint8).reshape(items, -1) for raw in (ours, theirs))
    return (a == b).all(axis=1)
