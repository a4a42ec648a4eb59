"""Answers of a system as values: outputs, the variant that gave them, and their receipt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one request.

    Attributes:
        outputs: numpy arrays by output name; the first axis counts the request's items.
        variant: that answered.
        slice: where; "" without a receipt.
        joules: estimate of its active energy (docs/dispatcher.md, Receipts); None: not known, never 0.
        grams: the same in CO2.
        tokens: of a generated text, as its receipt counts them.
        basis: of both: measured, modelled, synthetic, simulated, none; "" without a receipt.
        method: of both, in words.
    """

    outputs: Mapping[str, npt.NDArray[Any]]
    variant: str
    slice: str = ""
    joules: float | None = None
    grams: float | None = None
    basis: str = ""
    method: str = ""
    tokens: int = 0


def answer_of(result: Any) -> Answer:
    """Outputs of a response, and what its parameters tell."""
    response = result.get_response()
    told = {name: getattr(v, v.WhichOneof("parameter_choice")) for name, v in response.parameters.items()}
    carbon_mg = told.get("trefoil_carbon_mg_estimate")
    return Answer(
        outputs={output.name: result.as_numpy(output.name) for output in response.outputs},
        variant=told.get("trefoil_variant", ""),
        slice=told.get("trefoil_slice", ""),
        joules=told.get("trefoil_energy_j_estimate"),
        grams=None if carbon_mg is None else carbon_mg / 1e3,
        basis=told.get("trefoil_receipt_basis", ""),
        method=told.get("trefoil_receipt_method", ""),
        tokens=told.get("trefoil_tokens_out", 0),
    )
