"""OpenAI's /v1/files and /v1/batches on the REST port: JSONL in, a job of its lines, JSONL out.

A batch is a job whose items are the lines of its input file (line_run.py). Its output and error files are read from the
job's results. A batch that misses its window does not expire: it continues and is marked late.
"""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import parse_qs

from dispatcher.fronts.grpc.server import Fronts
from dispatcher.fronts.openai.app import Route
from dispatcher.fronts.openai.batch_lines import Checked, LineError, check_file, lines_of
from dispatcher.fronts.openai.bodies import ENDPOINTS
from dispatcher.fronts.rest import codec, json_text
from dispatcher.fronts.rest.calls import (
    PROMPT_BYTES_MAX,
    UNREAD_S,
    ClientDisconnected,
    HttpError,
    HttpReply,
    HttpRequest,
    body_of,
    discard,
    read_body,
)
from dispatcher.fronts.rest.codec_process import CodecProcess
from dispatcher.jobs.core.form import Form
from dispatcher.jobs.core.job import DEADLINE_MAX_S, ENDED, Job, JobState
from dispatcher.jobs.core.places import Places
from dispatcher.jobs.files import FOLDER, FileInfo, FilesFolder, FileUpload
from dispatcher.jobs.folder import JobReader, JobsFolder, Upload, arriving, on_disk, to_its_end
from dispatcher.jobs.service import MESSAGE_BYTES, READERS_MAX, UPLOADS_MAX, JobsAdmin
from dispatcher.request.core.tenants import INFER, Tenant
from protos.dispatcher.v1 import jobs_pb2
from trefoil.core.errors import InvalidInput, NotFound, TrefoilError, one_of
from trefoil.runtime.files import disk_error, open_regular

BATCH, REQUEST = "batch_", "batch_req_"
BODY_BYTES_MAX: Final = 64 * 1024
WINDOW_MAX_H: Final = int(DEADLINE_MAX_S // 3600)
COPY_BYTES: Final = 2**20
CHECK_MEMORY_BYTES: Final = 2**29
CHECK_S: Final = 600.0
"""Of one file, with the wait for others."""
CHECKS_MAX: Final = 4
"""Files of one tenant or host at once."""
PAIRS_MAX, KEY_CHARS_MAX, VALUE_CHARS_MAX = 16, 64, 512
"""Of metadata: OpenAI's own bounds."""
BATCHES_PAGE, BATCHES_PAGE_MAX, FILES_PAGE_MAX = 20, 100, 10_000
ENDED_MAX: Final = 10_000  # batches in memory, 3 KB each
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,3})h")
_PATH: Final = re.compile(r"/v1/(files|batches)(?:/([^/]+))?(?:/(content|cancel))?")
_OF_BATCH: Final = re.compile(r"file-([0-9a-f]{24})-(output|error)")


class BatchApi:
    """Routes of files and batches. Belongs to one event loop."""

    def __init__(self, fronts: Fronts, folder: JobsFolder, jobs: JobsAdmin) -> None:
        self._local, self._access, self._folder, self._jobs = fronts.local, fronts.access, folder, jobs
        self._files = FilesFolder(folder.root, folder.bounds, self._local.settings.jobs_keep_s)
        self._process = CodecProcess(CHECK_MEMORY_BYTES, CHECK_S, CHECKS_MAX)
        self._uploads = Places(UPLOADS_MAX, "files are being uploaded")
        self._readers = Places(READERS_MAX, "clients read files")
        self._ended: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {}  # batches, which change no more

    @property
    def routes(self) -> Mapping[str, Route]:
        """Routes by the first part of their path below /v1/."""
        return {"files": self._route, "batches": self._route}

    async def init(self) -> None:
        """Nothing: the folder is made by the first upload."""

    async def run(self) -> None:
        """Nothing: requests come by the REST port."""

    async def shutdown(self) -> None:
        """End the process that checks files."""
        await self._process.close()

    async def _route(self, ask: HttpRequest, tenant: Tenant) -> HttpReply | None:
        self._access.require_role(tenant, INFER)
        found = _PATH.fullmatch(ask.path)
        kind, name, verb = found.groups() if found else ("", None, None)
        try:
            if kind == "files" and verb == "content" and name:
                ask.needs("GET")
                await self._content(ask, tenant, name)
                return None
            if kind == "files" and verb is None:
                return _json(await self._on_files(ask, tenant, name))
            if kind == "batches" and verb == "cancel" and name:
                ask.needs("POST")
                return _json(await on_disk(self._cancel, tenant.name, name))
            if kind == "batches" and verb is None:
                return _json(await self._on_batches(ask, tenant, name))
        except OSError as error:
            raise disk_error(Path(FOLDER), error, "read or written", "nothing was kept") from error
        raise HttpError(404, f"{ask.path} is not offered. Remedy: see /v1/files and /v1/batches")

    async def _on_files(self, ask: HttpRequest, tenant: Tenant, name: str | None) -> Any:
        if name is None and ask.method == "POST":
            return await self._upload(ask, tenant)
        if name is not None and ask.method == "DELETE":
            await on_disk(self._delete, tenant.name, name)
            return {"id": name, "object": "file", "deleted": True}
        ask.needs("GET")
        if name is not None:
            return await on_disk(self._file, tenant.name, name)
        given, found = _given(ask.query), await on_disk(self._all_files, tenant.name)
        found = [each for each in found if given.get("purpose", "") in ("", each["purpose"])]
        return _page(given, found, FILES_PAGE_MAX, FILES_PAGE_MAX)

    async def _on_batches(self, ask: HttpRequest, tenant: Tenant, name: str | None) -> Any:
        if name is None and ask.method == "POST":
            return await self._create(ask, tenant)
        ask.needs("GET")
        if name is not None:
            return (await on_disk(self._batch, tenant.name, name))[0]
        found = await on_disk(self._all_batches, tenant.name)
        return _page(_given(ask.query), found, BATCHES_PAGE, BATCHES_PAGE_MAX)

    # --- files --------------------------------------------------------------------------------------------------------

    async def _upload(self, ask: HttpRequest, tenant: Tenant) -> Any:
        self._access.admit(tenant, 0)
        body = body_of(ask)
        with self._uploads.one(self._client(ask, tenant)):
            try:
                return _file_object(await self._received(ask, body, tenant), self._files)
            except (TrefoilError, OSError):
                await discard(body)
                raise

    async def _received(self, ask: HttpRequest, body: AsyncIterator[bytes], tenant: Tenant) -> FileInfo:
        form = Form(ask.headers.get("content-type", ""))
        async with arriving(FileUpload, self._files, tenant.name) as upload:
            async for part in body:
                for data in form.feed(part):
                    await to_its_end(upload.add, data)
            if not form.ended or form.filename is None:
                why = "is missing" if form.ended else "the form is incomplete"
                raise InvalidInput(why, field="file", remedy="send a complete form, with a file")
            purpose = form.fields.pop("purpose", "missing")
            if purpose != "batch":
                raise InvalidInput("is not taken", field="purpose", value=purpose, remedy='send "batch"')
            for name, value in form.fields.items():
                remedy = "leave it out: files stay jobs_keep_s, a setting of the dispatcher"
                raise InvalidInput("is not taken", field=name, value=value, remedy=remedy)
            return await to_its_end(upload.commit, form.filename, self._local.clock.now_s())

    def _file(self, tenant: str, name: str) -> dict[str, Any]:
        if (found := _OF_BATCH.fullmatch(name)) is None:
            return _file_object(self._files.get(name, tenant), self._files)
        with suppress(NotFound):
            for each in self._outputs(*self._batch(tenant, BATCH + found[1])):
                if each["id"] == name:
                    return each
        raise NotFound("is not a file of yours", field="file_id", value=name, remedy="GET /v1/files names them")

    def _all_files(self, tenant: str) -> list[dict[str, Any]]:
        """All files of a tenant, the newest first."""
        found = [(each.created_at_s, _file_object(each, self._files)) for each in self._files.all(tenant)]
        for name in self._names(tenant):
            with suppress(NotFound):
                found += [(each["created_at"], each) for each in self._outputs(*self._batch(tenant, name))]
        return [each for _, each in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def _outputs(self, batch: dict[str, Any], sizes: tuple[int, int]) -> list[dict[str, Any]]:
        """Output and error file of a batch that has ended."""
        files = (
            FileInfo(batch[f"{kind}_file_id"], "", f"{batch['id']}_{kind}.jsonl", size, batch["finalizing_at"])
            for kind, size in zip(("output", "error"), sizes, strict=True)
        )
        return [_file_object(each, self._files, "batch_output") for each in files if each.id]

    def _delete(self, tenant: str, name: str) -> None:
        if _OF_BATCH.fullmatch(name) and self._file(tenant, name):
            remedy = "leave it: it goes jobs_keep_s after its batch has ended"
            raise InvalidInput("is a batch's own", field="file_id", value=name, remedy=remedy)
        self._files.remove(self._files.get(name, tenant).id)

    async def _content(self, ask: HttpRequest, tenant: Tenant, name: str) -> None:
        with self._readers.one(self._client(ask, tenant)):
            size = (await on_disk(self._file, tenant.name, name))["bytes"]
            pieces = self._pieces(tenant.name, name)
            first = await anext(pieces, b"")  # a file that cannot be read is refused with a status
            headers = [(b"content-type", b"application/jsonl"), (b"content-length", b"%d" % size)]
            await ask.send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send(ask, first)
            try:
                async for piece in pieces:
                    await _send(ask, piece)
            except OSError as error:
                raise ClientDisconnected from error  # the connection is closed before its last byte
            await _send(ask, b"", more=False)

    def _client(self, ask: HttpRequest, tenant: Tenant) -> str:
        """Tenant or host that a request counts for."""
        return ask.caller(self._access, tenant).flow[0]

    async def _pieces(self, tenant: str, name: str) -> AsyncIterator[bytes]:
        """Bytes of a file. Raises OSError."""
        if (found := _OF_BATCH.fullmatch(name)) is None:
            file = await on_disk(_open, self._files.path(self._files.get(name, tenant)))
            try:
                while piece := await on_disk(file.read, MESSAGE_BYTES):
                    yield piece
            finally:
                file.close()
            return
        reader, item = await on_disk(lambda: JobReader(self._folder, BATCH + found[1], kept=True)), 0
        while item < reader.stored.items:
            data, item = await on_disk(_lines, reader, item, found[2] == "error")
            if data:
                yield data

    # --- batches ------------------------------------------------------------------------------------------------------

    async def _create(self, ask: HttpRequest, tenant: Tenant) -> Any:
        body = await read_body(ask, BODY_BYTES_MAX, "BODY_BYTES_MAX")
        self._access.admit(tenant, 0)
        given = _read_batch(body)
        info = await on_disk(self._files.get, given["input_file_id"], tenant.name)
        path, line_bytes = self._files.path(info), self._line_bytes_max()
        items_max, client = self._folder.bounds.items_max, self._client(ask, tenant)
        checked = await self._process.call(client, check_file, str(path), given["endpoint"], items_max, line_bytes)
        window_s = 3600.0 * int(given["completion_window"].removesuffix("h"))
        job = Job(
            BATCH + uuid.uuid4().hex[:24], checked.model, self._jobs.calendar_s() + window_s, tenant.name,
            endpoint=given["endpoint"],
        )  # fmt: skip
        await on_disk(self._folder.check_room, job)
        if not checked.errors:
            try:
                await self._jobs.check(job)
            except (InvalidInput, NotFound) as error:
                code = "model_not_found" if isinstance(error, NotFound) else "invalid_request"
                checked.errors.append(LineError(code, str(error), param=error.field))
        await self._commit(job, path, checked, {**given, "errors": [asdict(each) for each in checked.errors]})
        return (await on_disk(self._batch, tenant.name, job.id))[0]

    async def _commit(self, job: Job, path: Path, checked: Checked, record: Mapping[str, Any]) -> None:
        async with arriving(Upload, self._folder, job) as upload:
            refused = checked.errors[0].message if checked.errors else ""
            if not refused:
                with await on_disk(_open, path) as file:
                    while lines := await on_disk(file.readlines, COPY_BYTES):
                        await to_its_end(upload.add, list(lines_of(lines)))
            await to_its_end(upload.commit, self._jobs.calendar_s(), record, refused)

    def _line_bytes_max(self) -> int:
        settings = self._local.settings
        bounds = (PROMPT_BYTES_MAX, settings.message_bytes_max, settings.rest_json_bytes_max)
        return min(each for each in bounds if each >= 0)

    def _cancel(self, tenant: str, name: str) -> dict[str, Any]:
        batch, _ = self._batch(tenant, name)
        if batch["status"] == "in_progress":
            self._folder.cancel(name, "cancelled by its client")
        return self._batch(tenant, name)[0]

    def _names(self, tenant: str) -> list[str]:
        """Batches of a tenant, the newest first."""
        found = []
        for name in self._folder.ids():
            stored = self._folder.find(name)
            if stored is not None and stored.job.tenant == tenant and stored.job.endpoint:
                found.append((stored.submitted_at_s, name))
        return [name for _, name in sorted(found, reverse=True)]

    def _all_batches(self, tenant: str) -> list[dict[str, Any]]:
        found = []
        for name in self._names(tenant):
            with suppress(NotFound):
                found.append(self._batch(tenant, name)[0])
        return found

    def _batch(self, tenant: str, name: str) -> tuple[dict[str, Any], tuple[int, int]]:
        """A batch as OpenAI has it, and the bytes of its output and error file. Blocks. Raises NotFound."""
        record, cancelling_s = self._folder.batch(name, tenant)
        if (known := self._ended.get(name)) is not None:
            return known
        reader = JobReader(self._folder, name)
        status, job, ledger = self._jobs.read_status(reader), reader.stored.job, reader.ledger
        ended, created_s = status.state in ENDED, int(reader.stored.submitted_at_s)
        ended_s = int(ledger.ended_at_s) if ended else None
        word, errors = "cancelling" if cancelling_s else "in_progress", list[dict[str, Any]](record["errors"])
        if ended:
            cancelled = "cancelled" if cancelling_s and not errors else "failed"
            word = "completed" if status.state == JobState.DONE else cancelled
        if word == "failed" and not errors:
            errors = [asdict(LineError("batch_failed", status.why))]
        file_id = f"file-{name.removeprefix(BATCH)}"
        batch = {
            "id": name, "object": "batch", "endpoint": job.endpoint, "model": job.family,
            "errors": {"object": "list", "data": [_error(each) for each in errors]} if errors else None,
            "input_file_id": record["input_file_id"], "completion_window": record["completion_window"], "status": word,
            "output_file_id": f"{file_id}-output" if ended and ledger.answered else None,
            "error_file_id": f"{file_id}-error" if ended and ledger.failed else None,
            "created_at": created_s, "in_progress_at": None if record["errors"] else created_s,
            "expires_at": int(job.complete_by_s), "finalizing_at": ended_s,
            "completed_at": ended_s if word == "completed" else None,
            "failed_at": ended_s if word == "failed" else None, "expired_at": None,
            "cancelling_at": int(cancelling_s) if cancelling_s else None,
            "cancelled_at": ended_s if word == "cancelled" else None, "metadata": record["metadata"],
            "request_counts": {
                "total": reader.stored.items, "completed": ledger.answered, "failed": ledger.failed,
            },
            "trefoil": {"joules": ledger.joules, "grams": ledger.grams, "why": status.why, "late": status.late},
        }  # fmt: skip
        found = batch, (ledger.output_bytes, ledger.error_bytes)
        if ended:
            if len(self._ended) >= ENDED_MAX:  # removed ones, too
                self._ended.clear()
            self._ended[name] = found
        return found


def _given(query: str) -> dict[str, str]:
    """Parameters of a list."""
    return {name: values[-1] for name, values in parse_qs(query).items()}


def _page(given: Mapping[str, str], entries: list[dict[str, Any]], limit: int, limit_max: int) -> dict[str, Any]:
    """The page that is asked for, of a list whose newest entry comes first. Raises InvalidInput."""
    text, order, after = given.get("limit", str(limit)), given.get("order", "desc"), given.get("after")
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:6]) <= limit_max or len(text) > 6:
        raise InvalidInput("is not a number of entries", field="limit", value=text, remedy=f"send 1..{limit_max}")
    if order not in ("asc", "desc"):
        raise InvalidInput("is not an order", field="order", value=order, remedy="send asc or desc")
    entries = entries if order == "desc" else entries[::-1]
    if after is not None:
        at = next((n for n, each in enumerate(entries) if each["id"] == after), None)
        if at is None:
            remedy = "send the id of an entry, or leave it out"
            raise InvalidInput("is not in the list", field="after", value=after, remedy=remedy)
        entries = entries[at + 1 :]
    page = entries[: int(text)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(entries) > len(page)}


def _read_batch(body: bytes) -> dict[str, Any]:
    """What a batch is made of: input_file_id, endpoint, completion_window, metadata. Raises InvalidInput."""
    given = {name: value for name, value in json_text.parse(body).items() if value is not None}
    known = ("input_file_id", "endpoint", "completion_window", "metadata")
    for name in given:
        if name not in known:
            raise InvalidInput("is not a parameter of this API here", field=name[:64], remedy=one_of(known, name[:64]))
    for name in known[:3]:
        if type(given.get(name)) is not str:
            raise InvalidInput("is not text", field=name, value=given.get(name, "missing"), remedy="send a string")
    if given["endpoint"] not in ENDPOINTS:
        remedy = one_of(ENDPOINTS, given["endpoint"])
        raise InvalidInput("has no batches here", field="endpoint", value=given["endpoint"], remedy=remedy)
    window = given["completion_window"]
    if _WINDOW.fullmatch(window) is None or int(window[:-1]) > WINDOW_MAX_H:
        remedy = f'send hours, e.g. "24h", at most {WINDOW_MAX_H}'
        raise InvalidInput("is not a window", field="completion_window", value=window, remedy=remedy)
    metadata = given.setdefault("metadata", {})
    pairs = list(metadata.items()) if type(metadata) is dict else [("", None)]
    if len(pairs) > PAIRS_MAX or not all(
        _is_text(name, KEY_CHARS_MAX) and _is_text(value, VALUE_CHARS_MAX) for name, value in pairs
    ):
        remedy = f"send up to {PAIRS_MAX} texts of {VALUE_CHARS_MAX} characters, with names of {KEY_CHARS_MAX}"
        raise InvalidInput("cannot be kept", field="metadata", value=metadata, remedy=remedy)
    return given


def _is_text(value: Any, chars_max: int) -> bool:
    return type(value) is str and len(value) <= chars_max


def _file_object(info: FileInfo, files: FilesFolder, purpose: str = "batch") -> dict[str, Any]:
    return {
        "id": info.id, "object": "file", "bytes": info.size, "created_at": int(info.created_at_s),
        "expires_at": int(files.expires_at_s(info)), "filename": info.filename, "purpose": purpose,
        "status": "processed", "status_details": None,
    }  # fmt: skip


def _error(each: Mapping[str, Any]) -> dict[str, Any]:
    return {**each, "line": each["line"] or None, "param": each["param"] or None}


def _lines(reader: JobReader, first: int, failed: bool) -> tuple[bytes, int]:
    """Lines of a batch's output or error file from an item on, and the item to continue from. Blocks. Raises
    OSError."""
    found, after = reader.results(first, MESSAGE_BYTES)
    results = [jobs_pb2.ItemResult.FromString(data) for _, data in found]
    return b"".join(each.response + b"\n" for each in results if bool(each.code) is failed), after


def _open(path: Path) -> BinaryIO:
    return open(open_regular(path), "rb")


async def _send(ask: HttpRequest, data: bytes, more: bool = True) -> None:
    try:
        async with asyncio.timeout(UNREAD_S):
            await ask.send({"type": "http.response.body", "body": data, "more_body": more})
    except TimeoutError as error:
        raise ClientDisconnected from error


def _json(value: Any) -> HttpReply:
    return HttpReply(200, codec.dumps(value))
