"""Jobs of a running system from Python: items from a file or from arrays, how they stand, and what came of them."""

import codecs
import lzma
import os
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton
from google.protobuf.timestamp_pb2 import Timestamp
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from protos.dispatcher.v1 import jobs_pb2, jobs_pb2_grpc
from trefoil import direct
from trefoil.api.answers import Answer, answer_of
from trefoil.core.errors import InvalidInput, Unavailable, system_error
from trefoil.core.jobs.planned import PlannedHour
from trefoil.runtime import codec, rpc
from trefoil.runtime.files import NotPlain, open_plain
from trefoil.runtime.security.tls import Tls

CHUNK_BYTES: Final = 256 * 1024
TIMEOUT_S: Final = 30.0
SILENT_S: Final = 90.0  # a dispatcher sends a status every 30 s
PLAN_WAIT_S: Final = 5.0  # for a job's first plan: owner, controller and readers look every one or two seconds
SUFFIXES: Final = (".npz", ".jsonl")
ENDED: Final = ("done", "cancelled")
OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
UNPACKED_MAX: Final = 8 * 2**30  # bytes of a .npz, which is read whole: twice a dispatcher's jobs_bytes_max
ITEM_BYTES_MAX: Final = rpc.MESSAGE_BYTES_MAX - 2 * CHUNK_BYTES  # with what else is in its message
PRIORITY_MAX: Final = 2**32 - 1
ITEM_MAX: Final = 2**63 - 1
YEAR_9999_S: Final = 253_402_300_799.0
DAMAGED: Final = (
    OSError, NotPlain, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
    tokenize.TokenError,
)  # fmt: skip
"""What is raised for a file that is not plain, not a whole .npz, is encrypted, or packed in an unknown way."""
Items = Path | str | Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ZoneShare:
    """Items of a job in a peer's zone: without an answer yet (`away`), and answered, with joules and grams. These
    include what moved the items."""

    zone: str
    away: int
    answered: int
    joules: float
    grams: float


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How a job stands. Times are UTC seconds, 0.0 = not yet or not known; `state`: waiting, running, done, cancelled.

    `joules` and `grams` are sums of receipts; `why`: why it waits, is late, or ended before its last item. `prospect`:
    what its plan promises, e.g. "will finish at ..."; empty: it is not planned and runs whenever slices are idle.
    `in_danger`: by its plan it misses its deadline. `at_once_grams`, `evenly_grams`: grams if the items of `hours` ran
    at once, or evenly until the deadline. `first_error`: of the items that failed, the first one's number and error.
    `zones`: items in peers' zones.
    """

    id: str
    family: str
    state: str
    items: int
    answered: int
    failed: int
    complete_by_s: float
    late: bool
    why: str
    joules: float
    grams: float
    tenant: str
    priority: int
    submitted_at_s: float
    expected_at_s: float
    ended_at_s: float
    owner: str
    prospect: str = ""
    in_danger: bool = False
    hours: tuple[PlannedHour, ...] = ()
    at_once_grams: float = 0.0
    evenly_grams: float = 0.0
    first_error: str = ""
    zones: tuple[ZoneShare, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class ItemResult:
    """Result of one item, counted from 0: an answer, or the status and text of its error. `zone`: the peer's that
    answered; `moved_j`, `moved_g`: joules and grams of moving the item there and back, which its receipt leaves out."""

    item: int
    answer: Answer | None
    code: str = ""
    error: str = ""
    zone: str = ""
    moved_j: float = 0.0
    moved_g: float = 0.0


class Jobs:
    """Client of the jobs of a dispatcher, by a channel to its admin port. For one thread at a time."""

    def __init__(self, channel: grpc.Channel, token: str = "") -> None:
        self._channel, self._stub = channel, jobs_pb2_grpc.JobsStub(channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        token: str = "",
        ca: Path | str | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
    ) -> Self:
        """Client of the admin port at "host:port". `ca`: PEM file, to speak TLS; `tls`: instead, with a certificate;
        `insecure`: the token may leave this machine in clear text.

        Raises:
            SettingError: no address, a file that cannot be used, or a token that would leave in clear text.
        """
        tls = tls or (None if ca is None else Tls(None, None, Path(ca), serves=False))
        rpc.check_clear_text(address, token, tls, insecure=insecure)
        credentials = None if tls is None else tls.channel_credentials()
        return cls(direct.blocking_channel(address, credentials, OPTIONS), token)

    def submit(
        self,
        family: str,
        items: Items,
        *,
        complete_by_s: float,
        id: str = "",
        tenant: str = "",
        priority: int = 0,
        min_accuracy: float = 0.0,
        zones: tuple[str, ...] = (),
        grams_max: float = 0.0,
    ) -> JobStatus:
        """Submit a job; it is kept when this returns. `complete_by_s`: UTC seconds; `items`: see `read_items`.

        Raises:
            InvalidInput: a field, or a file that cannot be read or changes meanwhile; nothing is kept.
            NotFound: the family, tenant or none of the zones is known.
            Unavailable: no dispatcher answers, or its disk is full; nothing is kept.
        """
        if not 0 <= complete_by_s <= YEAR_9999_S:  # NaN is not
            remedy = "give UTC seconds, e.g. time.time() + 6 * 3600"
            raise InvalidInput("is not a time", field="complete_by", value=complete_by_s, remedy=remedy)
        by = Timestamp()
        by.FromMicroseconds(round(complete_by_s * 1e6))
        if not 0 <= priority <= PRIORITY_MAX:
            remedy = f"0 to {PRIORITY_MAX}; the highest first"
            raise InvalidInput("cannot be", field="priority", value=priority, remedy=remedy)
        job = jobs_pb2.Job(
            id=id, family=family, complete_by=by, tenant=tenant, priority=priority, min_accuracy=min_accuracy,
            zones=zones, grams_max=grams_max,
        )  # fmt: skip
        failure: list[Exception] = []
        try:
            call = self._stub.Submit(_messages(job, read_items(items), failure), metadata=self._metadata)
        except grpc.RpcError as error:
            raise failure[0] if failure else _explained(error) from error
        return _status(call.status)

    def get(self, name: str) -> JobStatus:
        """How a job stands. Raises NotFound, Unavailable."""
        return _status(self._ask("Get", jobs_pb2.GetRequest(id=name)).status)

    def planned(self, name: str, wait_s: float = PLAN_WAIT_S) -> JobStatus:
        """How a job stands once it is planned or has ended; at most `wait_s` later. Raises NotFound, Unavailable."""
        last = None
        call = self._stub.Watch(jobs_pb2.WatchRequest(id=name), timeout=wait_s, metadata=self._metadata)
        try:
            for told in call:
                last = _status(told.status)
                if last.prospect or last.ended:
                    break
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _explained(error) from error
        finally:
            call.cancel()
        return last or self.get(name)

    def all(self, tenant: str = "") -> list[JobStatus]:
        """All jobs, or those of a tenant, the next deadline first. Raises Unavailable."""
        return [_status(one) for one in self._ask("List", jobs_pb2.ListRequest(tenant=tenant)).jobs]

    def cancel(self, name: str, why: str = "") -> JobStatus:
        """End a job; what was answered stays. Raises NotFound, Unavailable."""
        return _status(self._ask("Cancel", jobs_pb2.CancelRequest(id=name, why=why)).status)

    def watch(self, name: str) -> Iterator[JobStatus]:
        """How a job stands, whenever that changes, until it has ended. Raises NotFound; Unavailable, also where nothing
        comes for SILENT_S."""
        last = None
        for told in self._stream("Watch", jobs_pb2.WatchRequest(id=name), SILENT_S):
            if told != last:
                yield _status(told.status)
            last = told

    def results(self, name: str, first: int = 0) -> Iterator[ItemResult]:
        """Results in the order of items, each once; of an unfinished job those so far. Raises as `watch`."""
        if not 0 <= first <= ITEM_MAX:
            raise InvalidInput("is not an item", field="first", value=first, remedy="items count from 0")
        for told in self._stream("GetResults", jobs_pb2.GetResultsRequest(id=name, first=first)):
            for one in told.results:
                answer = None
                if not one.code:
                    answer = answer_of(triton.InferResult(pb.ModelInferResponse.FromString(one.response)))
                yield ItemResult(one.item, answer, one.code, one.error, one.zone, one.moved_j, one.moved_g)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._channel.close()

    def _ask(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _explained(error) from error

    def _stream(self, method: str, request: Any, silent_s: float | None = None) -> Iterator[Any]:
        """Messages of a call, which is cancelled if none comes for a time; None: it waits."""
        try:
            call = getattr(self._stub, method)(request, metadata=self._metadata)
            while (message := _next(call, silent_s)) is not None:
                yield message
        except grpc.RpcError as error:
            if silent_s is not None and error.code() is grpc.StatusCode.CANCELLED:
                raise Unavailable(f"the dispatcher sent nothing for {silent_s:g} s", remedy="watch it again") from error
            raise _explained(error) from error


def _next(call: Any, silent_s: float | None) -> Any:
    if silent_s is None:
        return next(call, None)
    silence = threading.Timer(silent_s, call.cancel)
    silence.daemon = True
    silence.start()
    try:
        return next(call, None)
    finally:
        silence.cancel()


def read_items(source: Items) -> Iterator[bytes]:
    """Items of a job: of a .npz or of arrays one for each first index, of a .jsonl one for each line (KServe v2 JSON).
    A file may be in an object store, named by a URL that fsspec knows; this process reads it, with its credentials.

    Raises:
        InvalidInput: the file cannot be read, is of another kind, or changes while it is read; arrays differ in length.
    """
    if not isinstance(source, Path | str):
        yield from _of_arrays(source)
        return
    name = _shown(source)
    if not name.endswith(SUFFIXES):
        remedy = f"give a file that ends in {' or '.join(SUFFIXES)}"
        raise InvalidInput("is of no known kind", field="items", value=name, remedy=remedy)
    try:
        with _opened(source) as (file, stamp):
            before = stamp()
            if name.endswith(".jsonl"):
                lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in file)  # editors begin files with it
                yield from (line for line in lines if line)
                _require_unchanged(name, before, stamp())
                return
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ValueError("it is a .npy")
            assert loaded.zip is not None
            if (size := sum(member.file_size for member in loaded.zip.infolist())) > UNPACKED_MAX:
                remedy = f"at most {UNPACKED_MAX} bytes: split it into several, each a job, or give a .jsonl"
                raise InvalidInput(f"holds {size} bytes", field="items", value=name, remedy=remedy)
            arrays = {name: loaded[name] for name in loaded.files}
            _require_unchanged(name, before, stamp())
    except MemoryError as error:
        remedy = "split it into several, each a job, or give a .jsonl"
        raise InvalidInput("does not fit into memory", field="items", value=name, remedy=remedy) from error
    except DAMAGED as error:
        raise system_error(
            InvalidInput, error, "be read", Path(name), field="items", remedy="give a whole file"
        ) from error
    yield from _of_arrays(arrays)


@contextmanager
def _opened(source: Path | str) -> Iterator[tuple[IO[bytes], Callable[[], object]]]:
    """A file, and what tells its state: another one where it has changed."""
    if isinstance(source, Path) or "://" not in source:
        with open_plain(Path(source), 2**63) as file:
            yield file, lambda: (os.stat(source).st_mtime_ns, os.stat(source).st_size)
        return
    try:
        import fsspec  # of the extra `stores`
    except ImportError as error:
        remedy = "install trefoil[stores], and the package of the store, e.g. s3fs"
        raise InvalidInput("needs fsspec", field="items", value=_shown(source), remedy=remedy) from error
    try:
        store, path = fsspec.url_to_fs(source)

        def stamp() -> object:
            store.invalidate_cache()
            return store.ukey(path)

        with store.open(path, "rb") as file:
            yield file, stamp
    except InvalidInput:
        raise
    except Exception as error:  # each store has other error types, whose texts may hold the keys of signed URLs
        why = f"cannot be read ({type(error).__name__})"
        remedy = "see that it is there and whole, and that fsspec has the store's package and credentials"
        raise InvalidInput(why, field="items", value=_shown(source), remedy=remedy) from error


def _shown(source: Path | str) -> str:
    """Name of a file; of a URL without user, password and query."""
    head, mark, rest = str(source).rpartition("://")
    if isinstance(source, Path) or not mark:
        return str(source)
    return f"{head}{mark}{rest.partition('?')[0].rpartition('@')[2]}"


def _of_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[bytes]:
    if wrong := [name for name, values in arrays.items() if not isinstance(values, np.ndarray)]:
        value, remedy = type(arrays[wrong[0]]).__name__, "give numpy.asarray(...) of it"
        raise InvalidInput("is not an array", field=f"items.{wrong[0]}", value=value, remedy=remedy)
    lengths = {name: len(values) if values.ndim else 0 for name, values in arrays.items()}
    if not lengths:
        raise InvalidInput("holds no arrays", field="items", remedy="give one array for each input, by its name")
    if len(set(lengths.values())) != 1:
        remedy = "give each array one entry for each item"
        raise InvalidInput("arrays differ in their first size", field="items", value=lengths, remedy=remedy)
    for name, values in arrays.items():
        if np_to_triton_dtype(values.dtype) is None:
            remedy = "cast it to a type of KServe v2 in the byte order of this machine, e.g. .astype(numpy.float32)"
            raise InvalidInput("is not a tensor's type", field=f"items.{name}", value=str(values.dtype), remedy=remedy)
    for index in range(next(iter(lengths.values()))):
        message = pb.ModelInferRequest()
        for name, values in arrays.items():
            one = values[index : index + 1]
            datatype = np_to_triton_dtype(values.dtype)
            message.inputs.add(name=name, datatype=datatype, shape=one.shape)
            texts = datatype == "BYTES"
            if values.dtype.hasobject and (strange := [each for each in one.flat if not isinstance(each, bytes | str)]):
                value, remedy = str(strange[0]), "give bytes or str; for numbers an array of their own type"
                raise InvalidInput(f"item {index} is not text", field=f"items.{name}", value=value, remedy=remedy)
            message.raw_input_contents.append(serialize_byte_tensor(one).item() if texts else one.tobytes())
        yield message.SerializeToString()


def _messages(job: Any, items: Iterator[bytes], failure: list[Exception]) -> Iterator[Any]:
    """Messages of Submit. gRPC keeps the error of such an iterator to itself: it is noted."""
    yield jobs_pb2.SubmitRequest(job=job)
    try:
        chunk, size, total = list[bytes](), 0, 0
        for item in items:
            if len(item) > ITEM_BYTES_MAX:
                why, remedy = f"item {total} has {len(item)} bytes", f"at most {ITEM_BYTES_MAX}: split it"
                raise InvalidInput(why, field="items", remedy=remedy)
            chunk.append(item)
            size, total = size + len(item), total + 1
            if size >= CHUNK_BYTES:
                yield jobs_pb2.SubmitRequest(items=jobs_pb2.Items(requests=chunk))
                chunk, size = [], 0
        yield jobs_pb2.SubmitRequest(items=jobs_pb2.Items(requests=chunk))
        yield jobs_pb2.SubmitRequest(total=total)
    except Exception as error:
        failure.append(error)
        raise


def _require_unchanged(name: str, before: object, after: object) -> None:
    if after != before:
        remedy = "submit it again when it is whole"
        raise InvalidInput("changed while it was read", field="items", value=name, remedy=remedy)


def _explained(error: Any) -> Exception:
    found = rpc.error_of(error)
    if isinstance(found, Unavailable) and not found.remedy and "Remedy: " not in str(found):
        remedy = "see that the dispatcher's admin port is there: trefoil status"
        return Unavailable(str(found), remedy=remedy)
    return found


def _status(told: Any) -> JobStatus:
    job = told.job
    return JobStatus(
        id=job.id, family=job.family, state=jobs_pb2.JobState.Name(told.state).removeprefix("JOB_STATE_").lower(),
        items=told.items, answered=told.answered, failed=told.failed, complete_by_s=_seconds(job.complete_by),
        late=told.late, why=told.why, joules=told.joules, grams=told.grams, tenant=job.tenant, priority=job.priority,
        submitted_at_s=_seconds(told.submitted_at), expected_at_s=_seconds(told.expected_at),
        ended_at_s=_seconds(told.ended_at), owner=told.owner, prospect=told.prospect, in_danger=told.in_danger,
        hours=tuple(codec.from_proto(one) for one in told.hours), at_once_grams=told.at_once_grams,
        evenly_grams=told.evenly_grams, first_error=told.first_error,
        zones=tuple(ZoneShare(one.zone, one.away, one.answered, one.joules, one.grams) for one in told.zones),
    )  # fmt: skip


def _seconds(time: Any) -> float:
    return float(time.ToMicroseconds()) / 1e6
