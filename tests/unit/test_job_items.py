"""Items of a job that cannot be: files, arrays and numbers, each refused by name before anything is sent."""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from protos.dispatcher.v1 import jobs_pb2
from trefoil.api import jobs as jobs_api
from trefoil.api.jobs import read_items
from trefoil.core.errors import InvalidInput


def zipped(path, change=lambda data: data, **arrays) -> Path:
    """A .npz whose bytes are changed."""
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)
    path.write_bytes(change(path.read_bytes()))
    return path


def encrypted(data: bytes) -> bytes:
    """Members that are marked as encrypted, in their own head and in the directory."""
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data = re.sub(re.escape(mark) + b".{%d}" % (at - 4), lambda found: found[0] + b"\x01", data, flags=re.DOTALL)
    return data


def packed_by_99(data: bytes) -> bytes:
    """Members that are packed by a method of which zipfile knows none."""
    return data.replace(b"\x08\x00", b"\x63\x00")


def claiming(shape: str) -> Callable[[bytes], bytes]:
    """An array whose head says another shape, as long as its own."""
    own = b"'shape': (2000,), }"
    return lambda data: data.replace(own, b"'shape': (%b), }" % shape.encode().ljust(5))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda path: zipped(path, a=np.array([{}, 1], object)), "Object arrays cannot be loaded"),
        (lambda path: zipped(path, encrypted, a=np.zeros(9)), r"is encrypted, password required|cannot be read"),
        (lambda path: zipped(path, packed_by_99, a=np.zeros(9)), "cannot be read"),
        (lambda path: zipped(path, a=np.zeros(2**17)), r"holds 1048704 bytes"),
        (lambda path: stored(path, claiming("9e9,9")), "cannot be read"),
        (lambda path: stored(path, claiming("9**9,")), "cannot be read"),
        (lambda path: stored(path, claiming("-900,")), "cannot be read"),
        (lambda path: path.mkdir() or path, r"cannot be read \(is not a regular file\)"),
        (lambda path: os.mkfifo(path) or path, r"cannot be read \(is not a regular file\)"),
    ],
)  # fmt: skip
def test_a_npz_that_cannot_be_loaded_is_refused_by_name(tmp_path, monkeypatch, made, says):
    monkeypatch.setattr(jobs_api, "UNPACKED_MAX", 1_000_000)
    with pytest.raises(InvalidInput, match=f"items = '.*items.npz': .*(?:{says}).*Remedy: "):
        list(read_items(made(tmp_path / "items.npz")))


def stored(path, change) -> Path:
    """A .npz that is not compressed, with changed bytes and without the checksum that would show them."""
    np.savez(path, a=np.arange(2000))
    data = path.read_bytes()
    for mark, at in ((b"PK\x03\x04", 14), (b"PK\x01\x02", 16)):
        where = data.index(mark) + at
        data = data[:where] + bytes(4) + data[where + 4 :]
    path.write_bytes(change(data))
    return path


def test_no_memory_for_an_array_is_said(tmp_path, monkeypatch):
    path = zipped(tmp_path / "items.npz", a=np.zeros(3))
    monkeypatch.setattr(jobs_api.np, "load", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(InvalidInput, match=r"items = '.*items.npz': does not fit into memory. Remedy: split it"):
        list(read_items(path))


def test_lines_of_editors_and_other_systems(tmp_path):
    path = tmp_path / "items.jsonl"
    large = b'{"x": "' + b"y" * 2**21 + b'"}'
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \t\n{"b": 2}\n\xef\xbb\xbf{"c": 3}\n' + large + b"\n\n{}")
    assert list(read_items(path)) == [b'{"a": 1}', b'{"b": 2}', b'{"c": 3}', large, b"{}"]


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (
            {"a": np.array(["x", b"y", None], object)},
            r"items.a = 'None': item 2 is not text. Remedy: give bytes or str",
        ),
        ({"a": np.array([[1.5], ["x"]], object)}, r"items.a = '1.5': item 0 is not text"),
        ({"a": [1, 2]}, r"items.a = 'list': is not an array. Remedy: give numpy.asarray"),
        ({"a": np.zeros(2, ">f4")}, r"items.a = '>f4': is not a tensor's type. Remedy: cast it"),
        ({"a": np.zeros(2, complex)}, r"items.a = 'complex128': is not a tensor's type. Remedy: cast it"),
        ({"a": np.zeros(2), "b": np.float32(1)}, r"items.b = 'float32': is not an array"),
        ({}, "items: holds no arrays"),
    ],
)
def test_arrays_that_are_no_items_are_refused_by_name(arrays, says):
    with pytest.raises(InvalidInput, match=says):
        list(read_items(arrays))
    assert len(list(read_items({"a": np.array(["x", b"y"], object)}))) == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"complete_by_s": math.nan}, "complete_by = nan: is not a time. Remedy: give UTC seconds"),
        ({"complete_by_s": math.inf}, "complete_by = inf: is not a time"),
        ({"complete_by_s": -1.0}, "complete_by = -1.0: is not a time"),
        ({"complete_by_s": 1e15}, r"complete_by = 1000000000000000.0: is not a time"),
        ({"priority": 2**32}, "priority = 4294967296: cannot be. Remedy: 0 to 4294967295"),
        ({"priority": -1}, "priority = -1: cannot be"),
    ],
)
def test_what_no_message_can_hold_is_refused_before_anything_is_sent(given, says):
    jobs = jobs_api.Jobs.connect("127.0.0.1:1")
    with pytest.raises(InvalidInput, match=says):
        jobs.submit("digits", {"a": np.zeros(1)}, **{"complete_by_s": 1e9, **given})
    for first in (-1, 2**63):
        with pytest.raises(InvalidInput, match=f"first = {first}: is not an item. Remedy: items count from 0"):
            next(jobs.results("a", first))
    jobs.close()


def test_an_item_that_no_message_can_hold_is_refused_by_its_number(monkeypatch):
    monkeypatch.setattr(jobs_api, "ITEM_BYTES_MAX", 1000)
    failure: list[Exception] = []
    with pytest.raises(InvalidInput, match=r"items: item 2 has 1001 bytes. Remedy: at most 1000: split it"):
        list(jobs_api._messages(jobs_pb2.Job(), iter([bytes(1000), b"{}", bytes(1001)]), failure))
    assert len(failure) == 1
