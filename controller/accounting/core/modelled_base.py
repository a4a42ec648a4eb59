"""Modelled BASE: what the same answers would have taken in the same time with every GPU awake and the largest variant.

Source: CLOVER (SC 23) section 5.1, as `controller/planners/base.py` plans it.
Data: device types of the fleet, profile rows, metered time of each device, answers joined with it (`JoinedSample`).
Formulation: joules = idle_w of each device x its metered time + answers x energy line. The line is that of the most
accurate variant on the largest slice at the highest clock, as the mean over the devices. Joules are priced like metered
ones (intensity x PUE).
Deviations: BASE counts as having answered every answered request, whether or not it could have carried the load.
Where a profile or a device type is missing, the model is unknown, never 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.accounting.core.receipts import JoinedSample, energy_line
from trefoil.core.catalog import Catalog
from trefoil.core.common import Basis
from trefoil.core.errors import NotFound
from trefoil.core.fleet import DeviceType


@dataclass(frozen=True, slots=True)
class ModelledBase:
    """Model of BASE for one fleet. `unknown`: why it cannot be said, "" when it can; `basis`: what it rests on."""

    idle_w: Mapping[str, float] = field(default_factory=dict)  # by device
    request_j: Mapping[str, float] = field(default_factory=dict)  # by family
    item_j: Mapping[str, float] = field(default_factory=dict)  # by family
    basis: str = ""
    unknown: str = ""

    def idle_j(self, device: str, seconds: float) -> float:
        """Energy of an awake device on which nothing computes [J]."""
        return self.idle_w[device] * seconds

    def active_j(self, joined: JoinedSample) -> float:
        """Energy of these answers by the largest variant [J]; a family that is not modelled has none."""
        family = joined.family
        return self.request_j.get(family, 0.0) * joined.answered + self.item_j.get(family, 0.0) * joined.items


def model_base(catalog: Catalog, types: Mapping[str, DeviceType], families: Sequence[str]) -> ModelledBase:
    """Model BASE for these devices, with their types, and families."""
    if unknown := [kind.name for kind in types.values() if kind.unknown]:
        return ModelledBase(unknown=f"unknown device type {unknown[0]!r}")
    try:
        best_of = {family: catalog.family(family).best.name for family in families}
    except NotFound as error:
        return ModelledBase(unknown=str(error))
    if not types or not families:
        return ModelledBase(unknown="no device, or no family with an objective")
    requests, items, said = {}, {}, []
    for family, best in best_of.items():
        of_type = {}
        for kind in {kind.name: kind for kind in types.values()}.values():
            shape = kind.largest.name
            known = (kind.name, shape, family, best)
            rows = [
                row
                for row in catalog.rows
                if (row.device_type, row.slice_type, row.family, row.variant) == known
                and not row.stage
                and not row.cohosted
            ]
            if not rows:
                return ModelledBase(unknown=f"no profile of {best} on {shape} of {kind.name}")
            of_type[kind.name] = energy_line(rows, kind)
            basis = rows[0].provenance.basis if rows[0].provenance is not None else Basis.UNSPECIFIED
            said.append(f"{best} on {shape} of {kind.name} by its {basis.name.lower()} profile")
        lines = [of_type[kind.name] for kind in types.values()]
        requests[family] = sum(line.request_j for line in lines) / len(lines)
        items[family] = sum(line.item_j for line in lines) / len(lines)
    watts = sorted({f"{kind.idle_w:g} W idle ({_power_basis(kind)})" for kind in types.values()})
    return ModelledBase(
        {name: kind.idle_w for name, kind in types.items()},
        requests,
        items,
        f"{', '.join(said)}; all {len(types)} devices awake at {', '.join(watts)}; the same answers, at the carbon of "
        "their time",
    )


def _power_basis(kind: DeviceType) -> str:
    return kind.power_provenance.basis.name.lower() if kind.power_provenance is not None else "of no known basis"
