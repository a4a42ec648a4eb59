"""`trefoil.Client` before a real dispatcher: an answer in a line, its receipt, and our errors only."""

import asyncio
import json
import sys

import fsspec
import numpy as np
import pytest

import trefoil
from tests.support.dispatching import dispatcher_system, until
from tests.support.fake_triton import FakeTriton
from tests.support.job_serving import jobs_of
from tests.unit.dispatcher.worlds import key
from trefoil.api.jobs import read_items
from trefoil.core.common import Basis
from trefoil.core.energy import ReceiptRate
from trefoil.core.errors import Infeasible, InvalidInput, NotFound, SettingError, Unavailable

pytestmark = pytest.mark.integration
RATE = ReceiptRate(key(0), "digits", "digits-l", 0.5, 1.5, 1.1, Basis.MEASURED, 60.0)
IMAGES = np.zeros((2, 8, 8), np.uint8)
IMAGES[:, 0, 0] = (3, 7)


@pytest.fixture
async def system(state, tmp_path):
    async with dispatcher_system(state, tmp_path, FakeTriton(version=4)) as made:
        yield made


async def test_one_line_gives_outputs_variant_slice_and_receipt(system):
    await system.carbon()
    await system.rates(RATE)
    await until(lambda: system.local.accounting.receipts.price(key(0), "digits", "digits-l", 1, 1).carbon_mg > 0)
    with trefoil.Client(system.address) as client:
        answer = await asyncio.to_thread(client.infer, "digits", IMAGES)
        assert answer.outputs["PROBABILITIES"].argmax(axis=1).tolist() == [3, 7]
        assert (answer.variant, answer.slice, answer.basis) == ("digits-l", key(0).name, "measured")
        assert answer.joules == pytest.approx(3.5)
        assert answer.grams == pytest.approx(3.5 / 3.6e6 * 360 * 1.2)
        plain = await asyncio.to_thread(client.infer, "digits", {"IMAGE": IMAGES}, receipt=False)
        assert (plain.variant, plain.slice, plain.joules, plain.grams) == ("digits-l", "", None, None)


async def test_what_goes_wrong_is_one_of_our_errors(system):

    async def refused(error, named, *arguments, **more):
        with pytest.raises(error, match=named):
            await asyncio.to_thread(client.infer, *arguments, **more)

    with trefoil.Client(system.address) as client:
        await refused(NotFound, "nobody", "nobody", IMAGES)
        await refused(InvalidInput, r"inputs = \['PIXELS'\]: digits takes other inputs. Remedy: give \['IMAGE'\]",
                      "digits", {"PIXELS": IMAGES})  # fmt: skip
        await refused(InvalidInput, "inputs.IMAGE = 'float64': cannot be cast to UINT8", "digits", IMAGES / 2)
        await refused(Infeasible, "0.999", "digits", IMAGES, min_accuracy=0.999)
        system.slice.gate.clear()
        await refused(Unavailable, "DEADLINE_EXCEEDED", "digits", IMAGES, timeout_s=0.3)
        system.slice.gate.set()
    with trefoil.Client("127.0.0.1:1") as client:
        await refused(Unavailable, "127.0.0.1:1", "digits", IMAGES)
    with pytest.raises(SettingError, match="address = 'localhost': is not an address"):
        trefoil.Client("localhost")


async def test_a_job_from_arrays_files_and_what_cannot_be_read(system, state, tmp_path):
    async with jobs_of(system.running, state) as jobs:
        with trefoil.Client(system.address, admin=jobs.address) as client:
            images = np.zeros((20, 8, 8), np.float32)
            images[:, 0, 0] = np.arange(20) % 10
            with pytest.raises(InvalidInput, match=r"inputs.IMAGE = 'float32': cannot be cast to UINT8"):
                await asyncio.to_thread(client.submit, "digits", images, complete_in_s=60)
            np.savez(tmp_path / "items.npz", IMAGE=images.astype(np.uint8))
            lines = [
                {"inputs": [{"name": "IMAGE", "shape": [1, 8, 8], "datatype": "UINT8", "data": [n] * 64}]}
                for n in (4, 5)
            ]
            (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n{broken\n")
            for name, given in (
                ("arrays", images.astype(np.uint8)),
                ("npz", tmp_path / "items.npz"),
                ("jsonl", tmp_path / "items.jsonl"),
            ):
                await asyncio.to_thread(client.submit, "digits", given, complete_in_s=60, id=name)
                last = await asyncio.to_thread(lambda name=name: list(client.jobs.watch(name))[-1])
                results = await asyncio.to_thread(lambda name=name: list(client.jobs.results(name)))
                digits = [r.answer.outputs["PROBABILITIES"].argmax() for r in results if r.answer is not None]
                if name == "jsonl":
                    assert (last.state, digits, last.failed) == ("done", [4, 5], 1)
                    assert results[2].code == "INVALID_ARGUMENT"
                    assert results[2].error.startswith("failed to parse the request JSON")
                else:
                    assert (last.state, last.answered, digits) == ("done", 20, [n % 10 for n in range(20)])
            assert [job.id for job in await asyncio.to_thread(client.jobs.all)] == ["arrays", "npz", "jsonl"]
            (tmp_path / "empty.npz").write_bytes(b"")
            (tmp_path / "empty.jsonl").write_bytes(b"")
            np.savez(tmp_path / "ragged.npz", a=np.zeros(3), b=np.zeros(4))
            for given, says in (
                (tmp_path / "none.npz", r"items = '.*none.npz': cannot be read \(No such file"),
                (tmp_path / "empty.npz", r"items = '.*empty.npz': cannot be read \(No data left in file\)"),
                (tmp_path / "empty.jsonl", "items = 0: has no items"),
                (tmp_path / "ragged.npz", "items = {'a': 3, 'b': 4}: arrays differ in their first size"),
                (
                    tmp_path / "items.csv",
                    r"items = '.*items.csv': is of no known kind. Remedy: give a file that ends in .npz",
                ),
            ):
                with pytest.raises(InvalidInput, match=says):
                    await asyncio.to_thread(client.submit, "digits", given, complete_in_s=60)
            assert len(jobs.folder.ids()) == 3
        with pytest.raises(SettingError, match="admin: jobs need an admin port"):
            trefoil.Client(system.address).submit("digits", "items.npz", complete_in_s=60)


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text("{}\n{}\n")
    items = read_items(path)
    assert next(items) == b"{}"
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(InvalidInput, match=r"items = '.*': changed while it was read. Remedy: submit it again"):
        list(items)


def test_items_come_from_an_object_store(monkeypatch):
    store = fsspec.filesystem("memory")
    with store.open("/bucket/items.npz", "wb") as file:
        np.savez(file, IMAGE=np.arange(6, dtype=np.uint8).reshape(3, 2))
    store.pipe_file("/bucket/items.jsonl", b"{}\n\n{}\n")
    assert len(list(read_items("memory://bucket/items.npz"))) == 3
    assert list(read_items("memory://bucket/items.jsonl")) == [b"{}", b"{}"]
    items = read_items("memory://bucket/items.jsonl")
    next(items)
    store.pipe_file("/bucket/items.jsonl", b"{}\n\n{}\n{}\n")
    with pytest.raises(InvalidInput, match=r"'memory://bucket/items.jsonl': changed while it was read"):
        list(items)
    store.pipe_file("/bucket/torn.npz", b"PK")
    for url, words in (
        ("memory://bucket/gone.npz", "FileNotFoundError"),
        ("memory://bucket/torn.npz", "BadZipFile|ValueError|EOFError"),
        ("nostore://bucket/a.npz", "ValueError"),
        ("memory://bucket/items.csv", "is of no known kind"),
    ):
        with pytest.raises(InvalidInput, match=f"items = '{url}': .*({words}).*Remedy: "):
            list(read_items(url))
    with pytest.raises(InvalidInput) as caught:
        list(read_items("nostore://me:secret@bucket/a.npz?X-Signature=secret"))
    assert "secret" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InvalidInput, match=r"needs fsspec. Remedy: install trefoil\[stores\]"):
        list(read_items("memory://bucket/items.npz"))


def test_files_that_are_no_whole_npz_are_refused_by_name(tmp_path):
    path = tmp_path / "items.npz"
    np.savez_compressed(path, IMAGE=np.arange(2000))
    whole = path.read_bytes()
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    for data in (path.read_bytes(), whole[: len(whole) // 2], whole[:60] + b"\xff" * 200 + whole[260:]):
        path.write_bytes(data)
        with pytest.raises(InvalidInput, match=r"items = '.*items.npz': cannot be read .*Remedy: give a whole file"):
            list(read_items(path))
