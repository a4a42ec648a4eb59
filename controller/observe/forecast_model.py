"""Models of the forecaster `lstm` on disk: an ONNX file, and the card that says what it is and bears its hash."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.forecasters.lstm import INPUT_S
from trefoil.core.errors import InvalidInput, NotFound
from trefoil.runtime import codec

SHIPPED: Final = Path(__file__).resolve().parents[1] / "forecasters" / "lstm.onnx"
TRAIN: Final = "write it again with `trefoil forecast train`"


class OnnxNetwork:
    """Network that onnxruntime runs, on one thread."""

    def __init__(self, path: Path) -> None:
        """Open a model.

        Raises:
            InvalidInput: it is not what its card says, or no model of ten minutes.
            NotFound: there is no such file, or no card beside it.
        """
        import onnxruntime  # an extra

        self.card = read_card(path)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.card.get("sha256"):
            raise InvalidInput("is not the file that its card names", field="model", value=str(path), remedy=TRAIN)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
            self([0.0] * INPUT_S)  # the first run is slower
        except Exception as error:  # its errors have no base of their own
            why = f"is not a model of {INPUT_S} s ({' '.join(str(error).split())})"
            raise InvalidInput(why, field="model", value=str(path), remedy=TRAIN) from error

    def __call__(self, arrivals: Sequence[float]) -> float:
        """Largest second of the next minute [1/s]."""
        (found,) = self._session.run(None, {"arrivals": np.asarray([arrivals], dtype=np.float32)})
        return float(found.reshape(()))


def open_network(model: str) -> OnnxNetwork:
    """Open the model of a path, or where that is empty the shipped one; raises as `OnnxNetwork`."""
    return OnnxNetwork(Path(model) if model else SHIPPED)


def read_card(path: Path) -> dict[str, Any]:
    """Card of a model.

    Raises:
        InvalidInput: it is not a JSON object.
        NotFound: model or card is not there.
    """
    card = path.with_suffix(".json")
    for one in (path, card):
        if not one.is_file():
            raise NotFound(f"no forecast model {one}", remedy=TRAIN)
    try:
        found = codec.parse_json(card.read_bytes())
    except InvalidInput as error:
        raise InvalidInput(f"is not JSON ({error.message})", field="card", value=str(card), remedy=TRAIN) from error
    if not isinstance(found, dict):
        raise InvalidInput("is not a JSON object", field="card", value=str(card), remedy=TRAIN)
    return found
