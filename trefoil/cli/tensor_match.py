"""Which tensor of a model is which tensor of its family: by name, by what the user says, else by type and shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import model_config_pb2

from trefoil.cli.family_source import Source, refused
from trefoil.cli.onnx_names import TensorInfo, tensors
from trefoil.core.errors import CatalogError
from trefoil.runtime.model_files import ENGINES, FILES, backend_of


@dataclass(frozen=True, slots=True)
class Renames:
    """Tensor name in the model -> name in the family, and the tensors as the model's configuration has them."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    input_tensors: tuple[Any, ...]
    output_tensors: tuple[Any, ...]

    @property
    def needed(self) -> bool:
        """Whether any name differs."""
        return bool(self.changed)

    @property
    def changed(self) -> dict[str, str]:
        """The names that differ, old -> new."""
        return {old: new for old, new in (*self.inputs.items(), *self.outputs.items()) if old != new}


def match(source: Source, wanted: Mapping[str, str], family: Renames | None = None) -> Renames:
    """Give every tensor its name in the family; without `family` this model is the first and sets the names.

    Raises:
        CatalogError: naming the tensor and the field that differs.
    """
    inputs, outputs = _tensors(source)
    known = {tensor.name for tensor in (*inputs, *outputs)}
    if unknown := sorted(set(wanted) - known):
        raise refused(source.name, "--rename", unknown[0], f"name one of its tensors: {', '.join(sorted(known))}")
    if family is None:
        renames = Renames(
            {t.name: wanted.get(t.name, t.name) for t in inputs},
            {t.name: wanted.get(t.name, t.name) for t in outputs},
            inputs,
            outputs,
        )
    else:
        renames = Renames(
            _match(source, "input", inputs, wanted, family.input_tensors, family.inputs),
            _match(source, "output", outputs, wanted, family.output_tensors, family.outputs),
            inputs,
            outputs,
        )
    if renames.needed and backend_of(source.config) == ENGINES:
        old, new = next(iter(renames.changed.items()))
        raise refused(
            source.name, "name", old, f"build the engine with the tensor name {new}: an engine's cannot be changed"
        )
    return renames


def _match(
    source: Source,
    kind: str,
    have: Sequence[Any],
    wanted: Mapping[str, str],
    want: Sequence[Any],
    names: Mapping[str, str],
) -> dict[str, str]:
    """One direction. `want` are the first model's tensors, `names` what the family calls them."""
    family = {names[tensor.name]: tensor for tensor in want}
    if len(have) != len(family):
        own = [tensor.name for tensor in have]
        raise refused(source.name, kind, own, f"the family has {len(family)}: {', '.join(family)}")
    found: dict[str, str] = {}
    for tensor in have:
        name = wanted.get(tensor.name, tensor.name)
        if name in family:
            found[tensor.name] = name
    for tensor in have:
        if tensor.name not in found:
            found[tensor.name] = _alike(source, kind, tensor, have, family, found)
    if len(set(found.values())) < len(found):
        raise refused(source.name, kind, sorted(found), "two of its tensors have one name in the family: use --rename")
    for tensor in have:
        _refuse_other_shape(source, tensor, found[tensor.name], family[found[tensor.name]])
    return found


def _alike(
    source: Source, kind: str, tensor: Any, have: Sequence[Any], family: Mapping[str, Any], found: Mapping[str, str]
) -> str:
    """The only tensor of the family of this type and shape that nothing else is."""
    free = [name for name in family if name not in found.values()]
    of_type = [name for name in free if _form(family[name]) == _form(tensor)]
    rivals = [other for other in have if other.name not in found and _form(other) == _form(tensor)]
    if len(of_type) == 1 and len(rivals) == 1:
        return of_type[0]
    if len(free) == 1 and not of_type:
        _refuse_other_shape(source, tensor, free[0], family[free[0]])
    raise refused(
        source.name,
        f"{kind}.name",
        tensor.name,
        f"say which it is: --rename {source.name}:{tensor.name}=NAME with one of {', '.join(free)}",
    )


def _form(tensor: Any) -> tuple[int, tuple[int, ...]]:
    return tensor.data_type, tuple(tensor.dims)


def _refuse_other_shape(source: Source, tensor: Any, name: str, family: Any) -> None:
    if tensor.data_type != family.data_type:
        want, have = (model_config_pb2.DataType.Name(t.data_type) for t in (family, tensor))
        raise refused(source.name, f"{tensor.name}.data_type", have, f"the family's {name} is {want}; export it so")
    if tuple(tensor.dims) != tuple(family.dims):
        remedy = f"the family's {name} has {list(family.dims)}; export it so, with resizing inside the graph"
        raise refused(source.name, f"{tensor.name}.dims", list(tensor.dims), remedy)


def _tensors(source: Source) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Inputs and outputs; those that Triton completes by itself are read from the graph, all are compared with it."""
    inputs, outputs = tuple(source.config.input), tuple(source.config.output)
    if backend_of(source.config) == ENGINES:
        if not inputs or not outputs:
            raise refused(source.name, "input", [], "write input and output into its config.pbtxt")
        return inputs, outputs
    path = source.folder / source.files[FILES["onnxruntime"]]
    graph_inputs, graph_outputs = tensors(path)
    inputs = inputs or tuple(_completed(source, t, model_config_pb2.ModelInput()) for t in graph_inputs)
    outputs = outputs or tuple(_completed(source, t, model_config_pb2.ModelOutput()) for t in graph_outputs)
    for kind, said, graph in (("input", inputs, graph_inputs), ("output", outputs, graph_outputs)):
        there = {tensor.name for tensor in graph}
        for tensor in said:
            if tensor.name not in there:
                raise refused(
                    source.name, kind, tensor.name, f"{path} has {', '.join(sorted(there))}: mend config.pbtxt"
                )
    if lacking := {t.name for t in graph_inputs} - {t.name for t in inputs}:
        raise refused(source.name, "input", sorted(lacking), "its config.pbtxt has to list all inputs of the graph")
    return inputs, outputs


def _completed(source: Source, tensor: TensorInfo, entry: Any) -> Any:
    """The entry of config.pbtxt for a tensor of the graph: its batch dimension is not written there."""
    if not tensor.dims or tensor.dims[0] != -1:
        remedy = "export it with a batch dimension of any size"
        raise refused(source.name, f"{tensor.name}.dims", list(tensor.dims), remedy)
    if tensor.data_type not in model_config_pb2.DataType.keys():  # noqa: SIM118 - an enum wrapper, not a mapping
        raise CatalogError(f"model {source.name}: Triton has no {tensor.data_type}", field=tensor.name)
    entry.name, entry.data_type = tensor.name, model_config_pb2.DataType.Value(tensor.data_type)
    entry.dims.extend(tensor.dims[1:])
    return entry
