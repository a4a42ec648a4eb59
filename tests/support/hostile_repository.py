"""Triton repositories that want more than to be imported: what each does, and what of the refusal names it."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.support.foreign_models import LINEAR, add, graph

SECRET: Final = "the secret of this machine"
MODEL: Final = "large"
Attack = Callable[[Path, Path], None]
"""Given the model's folder in the repository, and a secret outside of it."""


def make(folder: Path) -> tuple[Path, Path]:
    """A repository of two sound models, and a secret beside it."""
    repository, secret = folder / "theirs", folder / "secret"
    add(repository, "small", LINEAR, graph("linear"))
    add(repository, MODEL, LINEAR, graph("mlp"))
    secret.write_text(SECRET)
    secret.chmod(0o600)
    return repository, secret


def field(number: int, value: bytes | int) -> bytes:
    """One field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    """A varint of protobuf."""
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def external(location: str, *path: int) -> bytes:
    """Part of an ONNX model: a tensor with external data there, at the end of these fields."""
    entry = field(1, b"location") + field(2, location.encode())
    found = field(8, b"w") + field(14, 1) + field(13, entry)
    for number in reversed(path):
        found = field(number, found)
    return found


def _replace(name: str, put: Callable[[Path, Path], object]) -> Attack:
    def attack(model: Path, secret: Path) -> None:
        path = model / name
        if os.path.lexists(path):
            path.unlink()
        put(path, secret)

    return attack


def _config(more: str, base: str = LINEAR) -> Attack:
    return lambda model, _: (model / "config.pbtxt").write_text(base + more)  # type: ignore[return-value]


def _graph(more: bytes) -> Attack:
    return _replace("1/model.onnx", lambda path, _: path.write_bytes(graph("mlp") + more))


def _linked_folder(name: str) -> Attack:
    def attack(model: Path, secret: Path) -> None:
        elsewhere = secret.parent / "elsewhere"
        (model / name).rename(elsewhere)
        (model / name).symlink_to(elsewhere)

    return attack


def _socket(path: Path, _: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # whose whole name may be too long for a socket
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path, _: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 2**42)


def _many(model: Path, _: Path) -> None:
    for number in range(300):
        (model / "1" / f"part{number}").touch()


PLACES: Final = {  # where tensors stand in an ONNX model
    "a weight": (7, 5),
    "a sparse weight": (7, 15, 1),
    "a constant": (7, 1, 5, 5),
    "a list of constants": (7, 1, 5, 10),
    "a graph inside of an operator": (7, 1, 5, 6, 5),
    "a function": (25, 7, 5, 5),
    "training": (20, 1, 5),
}
ATTACKS: Final[dict[str, tuple[Attack, str]]] = {
    "a model's file is a link to a secret": (_replace("1/model.onnx", lambda p, s: p.symlink_to(s)), "model.onnx"),
    "... a relative link": (_replace("1/model.onnx", lambda p, _: p.symlink_to("../../../secret")), "model.onnx"),
    "... a link to a link": (
        lambda m, s: [
            (m / "hop").symlink_to(s),
            _replace("1/model.onnx", lambda p, _: p.symlink_to("../hop"))(m, s),
        ],  # type: ignore[return-value]
        "model.onnx",
    ),
    "a file beside the model is a link to a secret": (_replace("1/w.bin", lambda p, s: p.symlink_to(s)), "w.bin"),
    "... a FIFO": (_replace("1/w.bin", lambda p, _: os.mkfifo(p)), "w.bin"),
    "... a socket": (_replace("1/w.bin", _socket), "w.bin"),
    "... an endless device": (_replace("1/w.bin", lambda p, _: p.symlink_to("/dev/zero")), "w.bin"),
    "... a sparse file of 4 TiB": (_replace("1/w.bin", _sparse), "bytes"),
    "a folder of a version is a link out": (
        lambda m, s: [(s.parent / "elsewhere").mkdir(), (s.parent / "elsewhere" / "w.bin").touch(),
                      (m / "1" / "more").symlink_to(s.parent / "elsewhere")],  # type: ignore[return-value]
        "w.bin",
    ),
    "... a link to itself": (
        lambda m, _: (m / "1" / "again").symlink_to("."), "too deep",  # type: ignore[return-value]
    ),
    "labels are a link to a secret": (
        lambda m, s: [_config("", LINEAR.replace("dims: [ 3 ]", "dims: [ 3 ] label_filename: 'l.txt'"))(m, s),
                      (m / "l.txt").symlink_to(s)],  # type: ignore[return-value]
        "l.txt",
    ),
    "... with a name of blanks": (_replace("1/a b", lambda p, _: p.touch()), "a b"),
    "the model's file is a FIFO": (_replace("1/model.onnx", lambda p, _: os.mkfifo(p)), "model.onnx"),
    "config.pbtxt is a FIFO": (_replace("config.pbtxt", lambda p, _: os.mkfifo(p)), "config.pbtxt"),
    "config.pbtxt is endless": (_replace("config.pbtxt", lambda p, _: p.symlink_to("/dev/zero")), "config.pbtxt"),
    "config.pbtxt is sparse": (_replace("config.pbtxt", _sparse), "config.pbtxt"),
    "config.pbtxt is a secret": (_replace("config.pbtxt", lambda p, s: p.symlink_to(s)), "config.pbtxt"),
    "config.pbtxt is binary": (_replace("config.pbtxt", lambda p, _: p.write_bytes(bytes(range(256)))), "config.pbtxt"),
    "the version is a link out": (_linked_folder("1"), "model.onnx"),
    "default_model_filename points outside": (
        _config('default_model_filename: "../../../secret"'), "default_model_filename",
    ),
    "... from the root": (_config('default_model_filename: "/etc/passwd"'), "default_model_filename"),
    "cc_model_filenames points outside": (
        _config('cc_model_filenames { key: "8.0" value: "../../../secret" }'), "cc_model_filenames",
    ),
    "a capability is a path": (
        _config('cc_model_filenames { key: "../../../x" value: "model.onnx" }'), "cc_model_filenames",
    ),
    "labels point outside": (
        _config('output { name: "z" data_type: TYPE_FP32 dims: 1 label_filename: "../../secret" }'), "label_filename",
    ),
    "dims overflow": (_config("", LINEAR.replace("dims: [", f"dims: [ {2**62}, {2**62},")), "dims"),
    "dims are negative": (_config("", LINEAR.replace("dims: [", "dims: [ -7,")), "dims"),
    "max_batch_size is absurd": (_config("max_batch_size: 2147483647"), "max_batch_size"),
    "thousand inputs": (_config('input { name: "z" data_type: TYPE_FP32 dims: 1 }' * 1000), "input"),
    "hundreds of files": (_many, "256 files"),
    **{
        f"{name} of the graph lies outside": (_graph(external("../../../secret", *path)), "external_data.location")
        for name, path in PLACES.items()
    },
    "weights of the graph lie at the root": (_graph(external("/etc/passwd", 7, 5)), "external_data.location"),
    "weights of the graph are missing": (_graph(external("w.bin", 7, 5)), "external_data"),
    "the graph is cut off": (_graph(varint(7 << 3 | 2) + varint(10**6)), "is not an ONNX model"),
    "the graph is a number without an end": (_graph(b"\xff" * 30), "is not an ONNX model"),
    "the graph is nested without an end": (
        lambda m, s: _graph(_nested(400))(m, s), "is not an ONNX model",
    ),
}  # fmt: skip


def _nested(depth: int) -> bytes:
    found = b""
    for _ in range(depth):
        found = field(1, field(5, field(6, found)))
    return field(7, found)


NAMES: Final = ("../../x", "..", "/tmp/x", "a/b", ".hidden", "a b", "x" * 200, "a\nb", "-x")
"""Names that `--as` must not take for a family, or a model."""


def leaves_nothing(folder: Path) -> list[str]:
    """What an import that was refused has left, or has shown of the secret."""
    found = [str(path) for path in folder.rglob("*") if "theirs" not in path.parts and path.is_file()]
    return [path for path in found if path != str(folder / "secret") and "elsewhere" not in path]
