"""OpenAI's files and batches: its unmodified Python package, before real Tritons."""

import asyncio
import errno
import hashlib
import io
import json
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from dispatcher.fronts.openai import completions
from dispatcher.jobs import job_run
from tests.support import engine_family
from tests.support.job_serving import Jobs, jobs_of
from tests.support.openai_serving import CHAT, base, both_tritons, serving_both, spelt
from tests.support.special_world import World

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tritons(tmp_path_factory):
    with both_tritons(tmp_path_factory.mktemp("batches")) as both:
        yield both


@pytest.fixture
async def world(state, tmp_path, tritons) -> AsyncIterator[World]:
    async with serving_both(state, tmp_path, tritons, window_s=0.1) as made:
        yield made


@pytest.fixture
async def jobs(world, state) -> AsyncIterator[Jobs]:
    async with jobs_of(world.running, state) as made:
        yield made


@pytest.fixture
async def client(world, jobs) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=base(world), api_key="none", max_retries=0, timeout=60.0) as made:
        yield made


def line(number, body, url="/v1/completions", **more) -> dict:
    return {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body, **more}


def jsonl(*lines) -> bytes:
    return b"".join(each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n" for each in lines)


async def uploaded(client, *lines):
    return await client.files.create(file=("asked.jsonl", io.BytesIO(jsonl(*lines))), purpose="batch")


async def batch_of(client, *lines, endpoint="/v1/completions", **more):
    file = await uploaded(client, *lines)
    more = {"completion_window": "24h", **more}
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, **more)


async def ended(client, batch):
    async with asyncio.timeout(20):
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_in(client, file_id) -> list[dict]:
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch_of_chats_is_made_polled_and_read(client):
    asked = [[{"role": "user", "content": f"which way is the sea, {n}"}] for n in range(12)]
    given = [
        line(n, {"model": CHAT, "messages": each, "max_tokens": 5}, "/v1/chat/completions")
        for n, each in enumerate(asked)
    ]
    given[7]["body"]["n"] = 3
    batch = await batch_of(client, *given, endpoint="/v1/chat/completions", metadata={"night": "1"})
    assert (batch.status, batch.model, batch.metadata) == ("in_progress", CHAT, {"night": "1"})
    assert batch.expires_at - batch.created_at == 24 * 3600
    batch = await ended(client, batch)
    assert (batch.status, batch.errors) == ("completed", None)
    assert batch.request_counts.model_dump() == {"total": 12, "completed": 11, "failed": 1}
    answers = await lines_in(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"request-{n}" for n in range(12) if n != 7]
    for each in answers:
        prompt = f"<user>{asked[int(each['custom_id'][8:])][0]['content']}\n<assistant>"
        [(text, tokens, reason)] = engine_family.answer(1, prompt, max_tokens=5)
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
        body = openai.types.chat.ChatCompletion.model_validate(each["response"]["body"])
        assert (body.choices[0].message.content, body.choices[0].finish_reason) == (text, reason)
        assert body.usage.completion_tokens == tokens
    [wrong] = await lines_in(client, batch.error_file_id)
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("request-7", 400)
    assert wrong["response"]["body"]["error"]["param"] == "n"
    assert (await client.batches.list()).data == [batch]


async def test_lines_wait_for_the_process_of_chat_templates(world, state, monkeypatch):
    monkeypatch.setattr(completions, "RENDERINGS_MAX", 1)
    monkeypatch.setattr(job_run, "ATTEMPTS_MAX", 1)
    body = {"model": CHAT, "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    given = [line(n, body, "/v1/chat/completions") for n in range(12)]
    async with (
        jobs_of(world.running, state),
        AsyncOpenAI(base_url=base(world), api_key="none", max_retries=0, timeout=60.0) as client,
    ):
        batch = await ended(client, await batch_of(client, *given, endpoint="/v1/chat/completions"))
    assert batch.request_counts.model_dump() == {"total": 12, "completed": 12, "failed": 0}


async def test_a_batch_of_embeddings_is_that_of_requests(client):
    path, texts = "/v1/embeddings", [[f"text {n} {at}" for at in range(n)] for n in range(1, 12)]
    given = [line(n, {"model": "embedder", "input": each}, path) for n, each in enumerate(texts)]
    given[4]["body"]["input"] = [7]
    batch = await ended(client, await batch_of(client, *given, endpoint=path))
    assert (batch.status, batch.endpoint) == ("completed", path)
    assert batch.request_counts.model_dump() == {"total": 11, "completed": 10, "failed": 1}
    for each in await lines_in(client, batch.output_file_id):
        body = openai.types.CreateEmbeddingResponse.model_validate(each["response"]["body"])
        asked = await client.embeddings.create(
            model="embedder", input=texts[int(each["custom_id"][8:])], encoding_format="float"
        )
        assert body.data == asked.data
        assert body.usage == asked.usage
    [wrong] = await lines_in(client, batch.error_file_id)
    assert wrong["response"]["body"]["error"]["param"] == "input"
    refused = await batch_of(client, line(0, {"model": CHAT, "input": "a"}, path), endpoint=path)
    assert (refused.status, refused.errors.data[0].param) == ("failed", "model")
    with pytest.raises(openai.BadRequestError, match="has no batches here"):
        await batch_of(client, given[0], endpoint="/v1/responses")


async def test_files_are_listed_read_and_deleted(client):
    given = jsonl(line(1, {"model": "speller", "prompt": "a"}), b"\r\n--not-a-boundary\r\n")
    file = await client.files.create(file=("über.jsonl", io.BytesIO(given)), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(given), "über.jsonl", "batch", "processed")
    assert (await client.files.content(file.id)).content == given
    other = await uploaded(client, line(1, {"model": "speller", "prompt": "b"}))
    assert {each.id for each in (await client.files.list()).data} == {file.id, other.id}
    page = await client.files.list(limit=1, order="asc")
    assert [each.id async for each in page] == [file.id, other.id]
    assert (await client.files.retrieve(file.id)) == file
    assert (await client.files.delete(file.id)).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="is not a file of yours"):
            await call(file.id)
    batch = await ended(client, await batch_of(client, line(1, {"model": "speller", "prompt": "a"})))
    output = await client.files.retrieve(batch.output_file_id)
    assert output.bytes == len((await client.files.content(output.id)).content) > 0
    assert output.id in [each.id for each in (await client.files.list(purpose="batch_output")).data]
    with pytest.raises(openai.BadRequestError, match="is a batch's own"):
        await client.files.delete(output.id)


GOOD = {"model": "speller", "prompt": "a"}
BAD = [
    ([line(1, GOOD), line(1, GOOD)], "duplicate_custom_id", 2, "custom_id"),
    ([line(1, GOOD), b"{not json\n"], "invalid_json_line", 2, None),
    ([line(1, GOOD, "/v1/chat/completions")], "url_mismatch", 1, "url"),
    ([line(1, GOOD), b"\n", line(2, {**GOOD, "model": "echo"})], "model_mismatch", 3, "body.model"),
    ([line(1, {**GOOD, "model": "nobody"})], "model_not_found", None, "family"),
    ([line(1, {**GOOD, "model": "scores"})], "invalid_request", None, "model"),
    ([line(1, {**GOOD, "prompt": "a" * (4 * 2**20)}), line(2, GOOD)], "invalid_request", 1, None),
    ([b"\n\n"], "empty_file", None, None),
    ([line(1, GOOD, method="GET")], "invalid_request", 1, "method"),
    ([{"body": GOOD}], "invalid_request", 1, "custom_id"),
]


@pytest.mark.parametrize(("lines", "code", "number", "param"), BAD)
async def test_a_wrong_file_fails_its_batch_by_line(client, lines, code, number, param):
    batch = await batch_of(client, *lines)
    assert batch.status == "failed"
    [error] = batch.errors.data
    assert (error.code, error.line, error.param) == (code, number, param)
    assert "Remedy: " in error.message or code == "invalid_json_line"
    assert (await client.batches.retrieve(batch.id)).errors == batch.errors
    assert batch.output_file_id is None


async def test_lines_that_the_model_refuses_have_their_own_errors(client, jobs, monkeypatch):
    monkeypatch.setattr("dispatcher.jobs.job_run.RETRY_S", 0.01)
    given = [
        line(0, {"model": "speller", "prompt": spelt(b"a", b"b")}),
        line(1, {"model": "speller", "prompt": spelt(b"a", error="broken")}),
        line(2, {"model": "speller", "prompt": "c", "stream": True}),
        line(3, {"model": "speller", "prompt": "d", "timeout": 5}),
        line(4, {"model": "speller", "prompt": "e" * 100_000}),
    ]
    batch = await ended(client, await batch_of(client, *given))
    assert batch.request_counts.model_dump() == {"total": 5, "completed": 2, "failed": 3}
    texts = [each["response"]["body"]["choices"][0]["text"] for each in await lines_in(client, batch.output_file_id)]
    assert texts == ["ab", "e" * 100_000]
    wrong = await lines_in(client, batch.error_file_id)
    assert [(each["custom_id"], each["response"]["status_code"]) for each in wrong] == [
        ("request-1", 500), ("request-2", 400), ("request-3", 400),
    ]  # fmt: skip
    assert [each["response"]["body"]["error"]["param"] for each in wrong] == [None, "stream", "timeout"]


async def test_cancelled_it_keeps_what_was_answered(client, world):
    given = [line(n, {"model": "speller", "prompt": spelt(*[b"on"] * 10, ms=20)}) for n in range(200)]
    batch = await batch_of(client, *given)
    async with asyncio.timeout(30):
        while not (await client.batches.retrieve(batch.id)).request_counts.completed:
            await asyncio.sleep(0.05)
    assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelled_at >= batch.cancelling_at >= batch.created_at
    assert 0 < batch.request_counts.completed == len(await lines_in(client, batch.output_file_id)) < 200
    assert (await client.batches.cancel(batch.id)).status == "cancelled"
    assert world.idle


async def test_lines_leave_a_slice_that_requests_need_and_are_answered_later(client, world, jobs, monkeypatch):
    monkeypatch.setattr("dispatcher.jobs.idle_slices.RATE_MEMORY_S", 0.3)
    given = [line(n, {"model": "speller", "prompt": spelt(*[b"on"] * 50, ms=20)}) for n in range(4)]
    batch = await batch_of(client, *given)
    async with asyncio.timeout(30):
        while world.local.routing.in_flight().get(world.slices[0].status().key, 0) < 2:
            await asyncio.sleep(0.01)
    answers = await asyncio.gather(
        *(client.completions.create(model="speller", prompt=spelt(b"a", ms=100)) for _ in range(4))
    )
    assert [each.choices[0].text for each in answers] == ["a"] * 4
    run = jobs.owner.runs[batch.id]
    assert not run.owned.ledger.answered, "their streams take a second and were cancelled"
    batch = await ended(client, batch)
    assert batch.request_counts.completed == 4


async def test_a_dispatcher_that_dies_leaves_its_batch_to_another_one(client, world, jobs, state):
    given = [line(n, {"model": "speller", "prompt": spelt(b"a", str(n).encode(), ms=20)}) for n in range(60)]
    batch = await batch_of(client, *given)
    async with asyncio.timeout(30):
        while not (await client.batches.retrieve(batch.id)).request_counts.completed:
            await asyncio.sleep(0.05)
    await jobs.kill()
    await state.release(jobs.owner._lease)
    async with jobs_of(world.running, state):
        batch = await ended(client, batch)
        texts = [
            each["response"]["body"]["choices"][0]["text"] for each in await lines_in(client, batch.output_file_id)
        ]
    assert texts == [f"a{n}" for n in range(60)]


async def test_a_full_disk_keeps_nothing_of_a_file_or_a_batch(client, jobs, monkeypatch):
    file = await uploaded(client, line(1, GOOD))
    for part in ("files.FileUpload.commit", "folder.Upload.commit"):

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(f"dispatcher.jobs.{part}", full)
            with pytest.raises(
                openai.InternalServerError, match=r"No space left.*nothing was kept.*Remedy: "
            ) as caught:
                await batch_of(client, line(1, GOOD))
            assert caught.value.status_code == 503
            assert str(jobs.folder.root) not in str(caught.value)
    assert len((await client.files.list()).data) == 2, "the file of the second batch was whole"
    assert (await client.batches.list()).data == []
    assert [path.name for path in jobs.folder.root.glob("**/.new*")] == []
    await client.files.delete(file.id)


WRONG = [
    ({"endpoint": "/v1/responses"}, "endpoint", "has no batches here"),
    ({"completion_window": "soon"}, "completion_window", "is not a window"),
    ({"completion_window": "8785h"}, "completion_window", "at most 8784"),
    ({"metadata": {"a": "x" * 600}}, "metadata", "cannot be kept"),
    ({"input_file_id": "file-none"}, "file_id", "is not a file of yours"),
    ({"extra_body": {"output_expires_after": {}}}, "output_expires_after", "is not a parameter"),
]


async def test_what_is_wrong_with_a_batch_or_a_file_is_named(world, client):
    file = await uploaded(client, line(1, GOOD))
    for change, param, words in WRONG:
        given = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **change}
        with pytest.raises(openai.APIStatusError, match=words) as caught:
            await client.batches.create(**given)
        assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    for given, param in (({"purpose": "vision"}, "purpose"), ({"purpose": "batch", "extra_body": {"a": "b"}}, "a")):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.create(file=b"x" * 2**22, **given)
        assert caught.value.param == param
    for name in ("limit=0", "limit=x", "order=up", "after=x"):
        with pytest.raises(openai.BadRequestError, match=name.split("=")[0]):
            await client.get(f"/batches?{name}", cast_to=object)
    for name in ("../x", "batch_none"):
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(name)
    async with httpx.AsyncClient(base_url=base(world), timeout=60.0) as plain:
        for method, path, status in (
            ("PUT", "/files", 405), ("GET", "/files/a/cancel", 404), ("DELETE", "/batches/a", 405),
            ("GET", "/files/a/b/c", 404), ("POST", "/files", 400),
        ):  # fmt: skip
            answer = await plain.request(method, path, content=b"x")
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


TENANTS = """
[[tenant]]
name = "one"
token_sha256 = "{}"

[[tenant]]
name = "two"
token_sha256 = "{}"
"""


async def test_a_tenant_sees_its_own_alone(state, tmp_path, tritons):
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(TENANTS.format(*(hashlib.sha256(each).hexdigest() for each in (b"one", b"two"))))
    settings = {"tenants_file": tenants, "window_s": 0.1}
    async with serving_both(state, tmp_path, tritons, **settings) as world, jobs_of(world.running, state):
        one, two, none = (
            AsyncOpenAI(base_url=base(world), api_key=each, max_retries=0) for each in ("one", "two", "x")
        )
        batch = await ended(one, await batch_of(one, line(1, GOOD)))
        assert batch.request_counts.completed == 1
        assert (await two.files.list()).data == (await two.batches.list()).data == []
        for call in (two.files.content(batch.output_file_id), two.files.retrieve(batch.input_file_id)):
            with pytest.raises(openai.NotFoundError):
                await call
        for call in (two.batches.retrieve(batch.id), two.batches.cancel(batch.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.NotFoundError, match="is not a file of yours"):
            await two.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
        with pytest.raises(openai.AuthenticationError):
            await none.files.list()
        for each in (one, two, none):
            await each.close()
