"""What a family looks like from outside: one metadata and one configuration, under its public name and version "1".

All variants of a family agree on names, types and shapes, so at first any live slice can report them. Then the
dispatcher asks one slice of each variant, as largest batches differ. It asks again when that slice is replaced. The
slice's own configuration is not passed on: it names variants and paths, and changes when they swap.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from dispatcher.routing.core.routing_table import Endpoint
from dispatcher.routing.core.sequences import IDLE_DEFAULT_S
from dispatcher.service.local_worker import LocalWorker
from dispatcher.transport.core.kserve_wire import BYTES_PER_ELEMENT, PUBLIC_VERSION
from trefoil.core.demand import PROBE_ID
from trefoil.core.errors import NotFound, Unavailable
from trefoil.core.fleet import SliceKey
from trefoil.runtime.given.llm_backends import ask_one_token
from trefoil.runtime.model_files import THREADS, ZERO_TEXT, isolate_sequence, probe_shape

ASK_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Contract:
    """Metadata and configuration of a family, as clients get them."""

    metadata: Any
    config: Any
    batches: bool = True
    """Whether the first dimension counts items."""

    @property
    def items_max(self) -> int:
        """Most items that one request may have: 1 without a batch dimension."""
        return max(1, int(self.config.config.max_batch_size))

    @property
    def decoupled(self) -> bool:
        """Whether the model is decoupled: any number of answers, which only a stream can bring."""
        return bool(self.config.config.model_transaction_policy.decoupled)

    @property
    def sequence_idle_s(self) -> float | None:
        """Longest idle time of a sequence [s]; None = the family has no sequences."""
        config = self.config.config
        if not config.HasField("sequence_batching"):
            return None
        return config.sequence_batching.max_sequence_idle_microseconds / 1e6 or IDLE_DEFAULT_S

    def zeros(self, model: str) -> Any:
        """Build the smallest request that the family accepts: what a probe sends."""
        request = pb.ModelInferRequest(model_name=model, id=PROBE_ID)
        optional = {each.name for each in self.config.config.input if each.optional}
        shapes = {each.name: probe_shape(self.config.config, each) for each in self.config.config.input}
        for each in self.metadata.inputs:
            if each.name in optional:
                continue
            shape = shapes.get(each.name) or [max(1, size) for size in each.shape]
            count = math.prod(shape)
            request.inputs.add(name=each.name, datatype=each.datatype, shape=shape)
            zero = ZERO_TEXT if each.datatype == "BYTES" else bytes(BYTES_PER_ELEMENT[each.datatype])
            request.raw_input_contents.append(zero * count)
        isolate_sequence(request, self.config.config)
        ask_one_token(request, self.config.config)
        return request


@dataclass(frozen=True, slots=True)
class _Told:
    """Contract that one slice reported, while its endpoint stays."""

    contract: Contract
    slice: SliceKey
    endpoint: Endpoint | None


class Contracts:
    """Contracts by family, as reported by its live slices."""

    def __init__(self, local: LocalWorker) -> None:
        self._routing = local.routing
        self._known: dict[str, Contract] = {}
        self._told: dict[str, dict[str, _Told]] = {}  # family -> variant
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def known(self, family: str) -> Contract | None:
        """Contract of a model, a family or a stage of one, if it was learned already."""
        return self._known.get(family)

    async def fetch(self, family: str) -> Contract:
        """Contract of a family, read from a live slice if it is not known yet. A split family has the inputs of its
        first stage and the outputs of its last.

        Raises:
            NotFound: the plan routes no such family.
            Unavailable: it is not known yet, and no live slice tells.
        """
        chain = self._routing.table.chains.get(family)
        if chain is None:
            raise unknown_model(family)
        for model in chain:
            if model not in self._known:
                async with self._asking[model]:
                    if model not in self._known:
                        await self._ask_any(model)
        told = [self._known[model] for model in chain]
        return told[0] if len(told) == 1 else _whole(family, told)

    def to_ask(self, family: str) -> dict[str, SliceKey]:
        """Live slices to query: one of each variant without a contract from a live slice."""
        table, told = self._routing.table, self._told.get(family, {})
        alive = set(table.alive.get(family, ()))
        found: dict[str, SliceKey] = {}
        for target in table.planned[family].targets if alive else ():
            one = told.get(target.variant)
            if target.slice in alive and not (one and self._stands(family, one)):
                found.setdefault(target.variant, target.slice)
        return found

    async def learn(self, family: str) -> None:
        """Ask the slices that are to be asked; those that do not tell are asked the next time.

        Raises:
            Unavailable: none of them answered.
        """
        async with self._asking[family]:
            whys = [await self._ask(family, variant, slice_) for variant, slice_ in self.to_ask(family).items()]
        if whys and all(whys):
            raise Unavailable(f"the contract of {family} is not renewed: {'; '.join(whys)}")

    async def from_slice(self, family: str, slice_: SliceKey) -> Contract:
        """Ask one slice for the contract of a family; raises AioRpcError."""
        connection = self._routing.connections.connection(slice_)
        asked = pb.ModelMetadataRequest(name=family)
        metadata = await connection.ask("ModelMetadata", asked, pb.ModelMetadataResponse, ASK_TIMEOUT_S)
        wanted = pb.ModelConfigRequest(name=family)
        config = await connection.ask("ModelConfig", wanted, pb.ModelConfigResponse, ASK_TIMEOUT_S)
        return published(family, metadata, config.config)

    async def _ask_any(self, family: str) -> None:
        why = self._routing.table.why.get(family) or "no slice is live"
        variants = {target.slice: target.variant for target in self._routing.table.planned[family].targets}
        for slice_ in self._routing.table.alive.get(family, ()):
            why = await self._ask(family, variants.get(slice_, ""), slice_)
            if not why:
                return
        raise Unavailable(f"the contract of {family} is not known yet: {why}", remedy="try again")

    async def _ask(self, family: str, variant: str, slice_: SliceKey) -> str:
        """Why a slice did not tell, "" if it did."""
        endpoint = self._routing.table.endpoints.get(slice_)
        try:
            contract = await self.from_slice(family, slice_)
        except grpc.aio.AioRpcError as error:
            return f"{slice_.name} answers {error.code().name} {error.details()}"
        except Unavailable as error:
            return str(error)
        told = self._told.setdefault(family, {})
        told[variant] = _Told(contract, slice_, endpoint)
        for gone in [v for v, one in told.items() if v != variant and not self._stands(family, one)]:
            del told[gone]
        self._known[family] = _least(contract, [one.contract for one in told.values()])
        return ""

    def _stands(self, family: str, told: _Told) -> bool:
        """Whether the slice of this contract is live at the same endpoint."""
        table = self._routing.table
        return told.slice in table.alive.get(family, ()) and table.endpoints.get(told.slice) == told.endpoint


def _least(contract: Contract, others: Iterable[Contract]) -> Contract:
    """The contract with the largest batch that all variants take."""
    config = pb.ModelConfigResponse()
    config.CopyFrom(contract.config)
    least = config.config.max_batch_size = min(other.config.config.max_batch_size for other in others)
    return Contract(contract.metadata, config, least > 0)


def _whole(family: str, stages: list[Contract]) -> Contract:
    """Contract of a family by those of its stages."""
    metadata, config = pb.ModelMetadataResponse(), pb.ModelConfigResponse()
    metadata.CopyFrom(stages[0].metadata)
    config.CopyFrom(stages[0].config)
    metadata.name = config.config.name = family
    last = stages[-1]
    for whole, own in ((metadata.outputs, last.metadata.outputs), (config.config.output, last.config.config.output)):
        del whole[:]
        whole.extend(own)
    least = config.config.max_batch_size = min(each.config.config.max_batch_size for each in stages)
    return Contract(metadata, config, least > 0)


def published(family: str, metadata: Any, config: Any) -> Contract:
    """Make the public contract of a slice's own answers, without what is the slice's own."""
    public = pb.ModelMetadataResponse(name=family, versions=[PUBLIC_VERSION], platform=metadata.platform)
    public.inputs.extend(metadata.inputs)
    public.outputs.extend(metadata.outputs)
    clean = model_config_pb2.ModelConfig(
        name=family, platform=config.platform, backend=config.backend, max_batch_size=config.max_batch_size
    )
    clean.version_policy.specific.versions.append(int(PUBLIC_VERSION))
    clean.input.extend(config.input)
    clean.output.extend(config.output)
    for name in config.parameters:
        if name != THREADS:
            clean.parameters[name].CopyFrom(config.parameters[name])
    if config.HasField("dynamic_batching"):
        clean.dynamic_batching.SetInParent()
    if config.HasField("sequence_batching"):
        ours, theirs = clean.sequence_batching, config.sequence_batching
        ours.max_sequence_idle_microseconds = theirs.max_sequence_idle_microseconds
        ours.control_input.extend(theirs.control_input)
        if theirs.WhichOneof("strategy_choice"):
            getattr(ours, theirs.WhichOneof("strategy_choice")).SetInParent()
    if config.HasField("model_transaction_policy"):
        clean.model_transaction_policy.CopyFrom(config.model_transaction_policy)
    return Contract(public, pb.ModelConfigResponse(config=clean), clean.max_batch_size > 0)


def unknown_model(family: str) -> NotFound:
    """NotFound error for a family that no slice serves, in Triton's words."""
    return NotFound(f"Request for unknown model: '{family}' is not found")
