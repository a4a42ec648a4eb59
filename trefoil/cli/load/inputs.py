"""What a load sends: labelled images of a family, or items that are made up from what its model says it takes."""

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trefoil import direct
from trefoil.cli.load.arrivals import LABELS_STREAM, Ints
from trefoil.core.errors import InvalidInput, NotFound, Unavailable, system_error
from trefoil.profiler.triton_load import DATATYPES, ITEMS_BYTES_MAX, item_shape, made_up
from trefoil.runtime.files import NotPlain, open_plain

MADE_UP: Final = 32  # items, of which each request takes its own
METADATA_S: Final = 10.0
DAMAGED: Final = (
    OSError, NotPlain, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError, TypeError,
)  # fmt: skip
"""What numpy raises for a file that is not a whole .npz of such arrays."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input of all items: name, KServe datatype, values with the items first."""

    name: str
    datatype: str
    values: NDArray[Any]


@dataclass(frozen=True, slots=True)
class LoadInputs:
    """Items to send. `labels` None: the right answer is unknown. `output`: of which the largest is the answer."""

    tensors: tuple[Tensor, ...]
    batched: bool = True
    labels: Ints | None = None
    output: str = ""

    def __len__(self) -> int:
        return len(self.tensors[0].values)

    def permuted(self, seed: int) -> "LoadInputs":
        """The same with each other's labels: a control; the accuracy must fall to chance.

        Raises:
            InvalidInput: there are none.
        """
        if self.labels is None:
            raise InvalidInput("generated items have no labels", field="--permute-labels", remedy="leave it out")
        return replace(self, labels=np.random.default_rng([seed, LABELS_STREAM]).permutation(self.labels))


def labelled_inputs(path: Path, input_name: str = "", output: str = "") -> LoadInputs:
    """Labelled images of an npz file, for this input and output of a model.

    Raises:
        InvalidInput: the file is missing, holds none, or of a type that cannot be sent.
    """
    try:
        with open_plain(path, ITEMS_BYTES_MAX) as file, np.load(file, allow_pickle=False) as data:
            images, labels = data["images"], data["labels"]
    except DAMAGED as error:
        remedy = "name an npz file with arrays `images` and `labels`"
        raise system_error(InvalidInput, error, "be read", path, field="images", remedy=remedy) from error
    if len(images) == 0 or len(images) != len(labels):
        raise InvalidInput(f"{path}: {len(images)} images, {len(labels)} labels", field="images", value=str(path))
    datatype = next((name for name, kind in DATATYPES.items() if images.dtype == kind), "")
    if not datatype:
        raise InvalidInput(
            f"arrays of {images.dtype} cannot be sent", field="images", value=str(path),
            remedy=f"store them as one of {sorted(np.dtype(kind).name for kind in DATATYPES.values())}",
        )  # fmt: skip
    return LoadInputs((Tensor(input_name, datatype, images),), labels=labels.astype(np.int64), output=output)


async def inputs_of_model(
    target: str, family: str, images: Path | None, shapes: Mapping[str, Sequence[int]]
) -> LoadInputs:
    """Items for a model that a KServe endpoint serves: those of `images`, else made up by its metadata.

    Raises:
        Unavailable: nothing answers. NotFound: it serves no such model.
        SettingError: an input's shape is open. InvalidInput: of a type that cannot be generated.
    """
    labelled = labelled_inputs(images) if images is not None else None
    async with direct.channel(target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            told = await stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=family), timeout=METADATA_S)
            config = await stub.ModelConfig(service_pb2.ModelConfigRequest(name=family), timeout=METADATA_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise Unavailable(
                    f"no answer ({error.details()})", field="target", value=target, remedy="see `trefoil status`"
                ) from error
            raise NotFound(
                f"{target} does not serve it ({error.details()})", field="--family", value=family,
                remedy="see `trefoil status`",
            ) from error  # fmt: skip
    if config.config.model_transaction_policy.decoupled:
        remedy = "`trefoil family generate` asks it once, `perf_analyzer --streaming --async` loads it"
        raise InvalidInput(
            "answers by streams, which this load does not support", field="--family", value=family, remedy=remedy
        )
    batched = config.config.max_batch_size > 0
    if labelled is not None:
        tensors = (replace(labelled.tensors[0], name=told.inputs[0].name),)
        return replace(labelled, tensors=tensors, output=told.outputs[0].name)
    made = []
    for tensor in told.inputs:
        shape = item_shape(tensor, shapes, batched=batched)
        made.append(Tensor(tensor.name, tensor.datatype, made_up(tensor, [MADE_UP, *shape])))
    return LoadInputs(tuple(made), batched)
