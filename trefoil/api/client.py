"""Client of a running system: one line from an address to an answer, with the variant that gave it and its receipt."""

import codecs
import queue
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from trefoil import direct
from trefoil.api.answers import Answer, answer_of
from trefoil.core.errors import Infeasible, InvalidInput, NotFound, SettingError, TrefoilError, Unavailable
from trefoil.runtime.given.llm_backends import stream_inputs

if TYPE_CHECKING:
    from trefoil.api.jobs import Jobs, JobStatus

TIMEOUT_S: Final = 30.0
ERRORS: Final[Mapping[str, type[TrefoilError]]] = {
    "INVALID_ARGUMENT": InvalidInput,
    "NOT_FOUND": NotFound,
    "FAILED_PRECONDITION": Infeasible,
    "UNAUTHENTICATED": SettingError,
    "PERMISSION_DENIED": SettingError,
}
"""Errors by status; every other one is `Unavailable`: nothing has been answered."""
REFUSED: Final = "INVALID_ARGUMENT: "
"""What the error of a stream begins with that is the request's own fault."""
BYTES_HEAD: Final = 4
"""Bytes of a string's length before it, one string a token."""
TEXTS: Final = ("TOKEN", "text_output")
"""Outputs with a stream's new text, by the APIs of generative families."""
TOKENS_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece of a generated text as it comes. The last one has no text, but the `answer` with what all of it cost."""

    text: str
    answer: Answer | None = None


class Client:
    """Client of the dispatcher at "host:port", or of any Triton, which gives no receipt. For one thread at a time.

    >>> trefoil.Client("127.0.0.1:8001").infer("digits", images).variant
    """

    def __init__(self, address: str, *, token: str = "", ca: Path | str | None = None, admin: str = "") -> None:
        """Connect at the first request. `token`: a tenant's or the cluster's; `ca`: PEM file, to speak TLS; `admin`:
        "host:port" of the dispatcher's admin port, for jobs.

        Raises:
            SettingError: no "host:port".
        """
        host, _, port = address.removeprefix("grpc://").rpartition(":")
        if not host or not port.isdecimal():
            raise SettingError(
                "is not an address", field="address", value=address, remedy='write "host:port", e.g. "127.0.0.1:8001"'
            )
        self.address = f"{host}:{port}"
        self._headers = {"authorization": f"Bearer {token}"} if token else None
        self._client = triton.InferenceServerClient(
            self.address,
            ssl=ca is not None,
            root_certificates=None if ca is None else str(ca),
            channel_args=direct.TRITON_CLIENT,
        )
        self._inputs: dict[str, tuple[tuple[str, str], ...]] = {}
        self._admin, self._token, self._ca = admin, token, ca
        self._jobs: Jobs | None = None

    def infer(
        self,
        family: str,
        inputs: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        *,
        min_accuracy: float = 0.0,
        slo_ms: float = 0.0,
        slo_class: str = "",
        priority: int = 0,
        receipt: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """Ask a family for one answer.

        Args:
            family: name of the family, as a Triton model.
            inputs: arrays by input name, or the one array of a family with one input; the first axis counts items.
                They are cast to the family's types where only precision is lost (float64 to FP32).
            min_accuracy: floor of the variant that answers, 0..1; 0: the plan's own.
            slo_ms: what "within SLO" means for this request [ms]; 0: its family's.
            slo_class: class that it is counted in.
            priority: Triton's, 1 comes first; 0: the default.
            receipt: ask what it cost.
            timeout_s: until an answer is of no use [s].

        Raises:
            InvalidInput: an input that the family does not take.
            NotFound: no such family.
            Infeasible: nothing that is live or planned reaches `min_accuracy`.
            SettingError: the token is not accepted.
            Unavailable: no service answers there, or not in time, or the queue is full.
        """
        asked = {
            "trefoil_min_accuracy": min_accuracy, "trefoil_slo_ms": slo_ms, "trefoil_class": slo_class,
            "trefoil_receipt": receipt,
        }  # fmt: skip
        try:
            result = self._client.infer(
                family,
                self._tensors(family, inputs),
                priority=priority,
                client_timeout=timeout_s,
                headers=self._headers,
                parameters={name: value for name, value in asked.items() if value} or None,
            )
        except InferenceServerException as error:
            raise self._explained(error, family) from error
        return answer_of(result)

    def generate(
        self,
        family: str,
        prompt: str,
        *,
        max_tokens: int | None = None,
        min_accuracy: float = 0.0,
        slo_class: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> Iterator[Piece]:
        """Ask a generative family to continue from a text; its pieces come as they are made. Leaving the loop cancels
        it.

        Args:
            family: name of the family, as a Triton model.
            prompt: what to continue from.
            max_tokens: most tokens of the answer; None: the family's own default (vLLM: 16).
            min_accuracy: floor of the variant that answers, 0..1; 0: the plan's own.
            slo_class: class that it is counted in.
            timeout_s: until the next piece is of no use [s].

        Raises:
            As `infer`, and InvalidInput: a prompt or `max_tokens` that the family does not take.
        """
        if max_tokens is not None and not 1 <= max_tokens <= TOKENS_MAX:
            raise InvalidInput("no number of tokens", field="max_tokens", value=max_tokens, remedy="1 or more")
        asked = {"trefoil_min_accuracy": min_accuracy, "trefoil_class": slo_class, "trefoil_receipt": True}
        come: queue.Queue[tuple[Any, Any]] = queue.Queue()
        text = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            tensors = self._stream_tensors(family, prompt, max_tokens)
            self._client.start_stream(lambda result, error: come.put((result, error)), headers=self._headers)
            self._client.async_stream_infer(
                family,
                tensors,
                enable_empty_final_response=True,
                parameters={name: value for name, value in asked.items() if value},
            )
            while True:
                result, error = come.get(timeout=timeout_s)
                if error is not None:
                    raise self._explained(error, family) from error
                response = result.get_response()
                for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
                    if output.name in TEXTS:
                        yield Piece(text.decode(raw[BYTES_HEAD:]))
                if response.parameters["triton_final_response"].bool_param:
                    yield Piece(text.decode(b"", final=True), answer_of(result))
                    return
        except queue.Empty:
            raise Unavailable(f"{self.address} has sent nothing for {timeout_s:g} s") from None
        except InferenceServerException as error:
            raise self._explained(error, family) from error
        finally:
            self._client.stop_stream(cancel_requests=True)

    @property
    def jobs(self) -> "Jobs":
        """Jobs of the dispatcher, by its admin port.

        Raises:
            SettingError: no admin port was named, or the authority's file cannot be read.
        """
        if self._jobs is None:
            from trefoil.api.jobs import Jobs  # brings what answers need not

            if not self._admin:
                remedy = 'name the dispatcher\'s: Client(address, admin="127.0.0.1:8104")'
                raise SettingError("jobs need an admin port", field="admin", remedy=remedy)
            self._jobs = Jobs.connect(self._admin, token=self._token, ca=self._ca)
        return self._jobs

    def submit(
        self,
        family: str,
        items: "Path | str | npt.ArrayLike | Mapping[str, npt.ArrayLike]",
        *,
        complete_in_s: float,
        **job: Any,
    ) -> "JobStatus":
        """Submit a job: its items run when slices are idle, until a deadline.

        Args:
            family: name of the family.
            items: a .npz or .jsonl file, or arrays as `infer` takes them; each first index is an item.
            complete_in_s: time from now until they should be done [s].
            job: other fields of `Jobs.submit`: id, tenant, priority, min_accuracy, zones, grams_max.

        Raises:
            As `Jobs.submit`; SettingError: no admin port was named.
        """
        from trefoil.runtime.clock import WallClock

        by_s = WallClock().now_s() + complete_in_s
        if isinstance(items, Path | str):
            return self.jobs.submit(family, items, complete_by_s=by_s, **job)
        arrays = {name: _cast(name, datatype, each) for name, datatype, each in self._matched(family, items)}
        return self.jobs.submit(family, arrays, complete_by_s=by_s, **job)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._client.close()
        if self._jobs is not None:
            self._jobs.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream_tensors(self, family: str, prompt: str, max_tokens: int | None) -> list[Any]:
        """Inputs of a stream by the API that the family's model speaks; raises InferenceServerException."""
        told = self._client.get_model_config(family, headers=self._headers, client_timeout=TIMEOUT_S)
        shape = (1, 1) if told.config.max_batch_size else (1,)
        made = []
        for name, value in stream_inputs(told.config, prompt.encode(), max_tokens).items():
            kind = "BYTES" if isinstance(value, bytes) else "BOOL" if isinstance(value, bool) else "INT32"
            dtype = np.object_ if kind == "BYTES" else None
            made.append(_tensor(name, kind, np.array([value], dtype=dtype).reshape(shape)))
        return made

    def _tensors(self, family: str, inputs: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> list[Any]:
        return [_tensor(name, datatype, values) for name, datatype, values in self._matched(family, inputs)]

    def _matched(
        self, family: str, inputs: npt.ArrayLike | Mapping[str, npt.ArrayLike]
    ) -> list[tuple[str, str, npt.ArrayLike]]:
        """Name, datatype and values of each input."""
        if family not in self._inputs:  # the same for every variant, for good
            told = self._client.get_model_metadata(family, headers=self._headers, client_timeout=TIMEOUT_S)
            self._inputs[family] = tuple((one.name, one.datatype) for one in told.inputs)
        known = dict(self._inputs[family])
        given = inputs if isinstance(inputs, Mapping) else {next(iter(known)): inputs}
        if given.keys() != known.keys():
            raise InvalidInput(
                f"{family} takes other inputs", field="inputs", value=sorted(given), remedy=f"give {sorted(known)}"
            )
        return [(name, known[name], values) for name, values in given.items()]

    def _explained(self, error: Any, family: str) -> TrefoilError:
        status, said = str(error.status()).rpartition(".")[2], str(error.message())
        if REFUSED in said:  # an error of a stream has no status
            status, said = REFUSED.removesuffix(": "), said.partition(REFUSED)[2]
        kind = ERRORS.get(status, Unavailable)
        remedy = "" if "Remedy: " in said else f"see that {self.address} serves {family}: trefoil status"
        return kind(f"{self.address} answers {status}: {said}", remedy=remedy)


def _cast(name: str, datatype: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    array, wanted = np.asarray(values), triton_to_np_dtype(datatype)
    if datatype != "BYTES":
        if not np.can_cast(array.dtype, wanted, "same_kind"):
            raise InvalidInput(
                f"cannot be cast to {datatype} without loss", field=f"inputs.{name}", value=str(array.dtype),
                remedy=f"give an array of {np.dtype(wanted).name}",
            )  # fmt: skip
        array = np.ascontiguousarray(array, wanted)
    return array


def _tensor(name: str, datatype: str, values: npt.ArrayLike) -> Any:
    array = _cast(name, datatype, values)
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made
