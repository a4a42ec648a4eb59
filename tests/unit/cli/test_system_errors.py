"""An error of the system is one line in every command: field, path or address, the system's words, a remedy."""

import errno
import io
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from trefoil.cli.main import app
from trefoil.core.errors import (
    NO_NAME,
    SYSTEM_REMEDIES,
    DiskUnavailable,
    PortInUse,
    StartError,
    in_one_line,
    listen_error,
    system_error,
)

OTHER_USER = 65534
# Commands that take a path, by what they do with it.
READS = (
    "up --config {}", "pin {}", "node preview {}", "objective set --controller 127.0.0.1:1 --file {}",
    "status --controller 127.0.0.1:1 --token-file {}", "status --controller 127.0.0.1:1 --ca {}", "simulate {}",
    "carbon backtest {}", "forecast backtest {}", "load --family digits --trace {}", "family sensitivity {}",
    "family import model_repository --as own=digits-s --slo-latency-ms 50 --accuracies {}", "load --images {}",
)  # fmt: skip
STRANGE_READS = (
    "replay {}", "state restore {} --config {}.toml", "lengths train {}", "assess --from-csv {}",
    "load --address 127.0.0.1:1 --family digits --slo-latency-ms 9 --images {}",
)  # fmt: skip
FOLDERS = (
    "up --state-dir {}/state", "status --state-dir {}/state", "down --state-dir {}/state",
    "state dump --state-dir {}/state", "replay 1 --state-dir {}/state", "family list --repository {}/models",
    "family check --repository {}/models", "family assume digits --repository {}/models",
)  # fmt: skip
# Commands whose result goes there after seconds to hours of work.
WRITES = (
    "simulate digits --out {}", "compare digits --out {}", "demo --out {}", "load --images {} --out {}",
    "family sensitivity model --out {}", "carbon backtest trace --out {}", "carbon backtest trace --plot {}",
    "forecast train trace --out {}", "lengths train log --out {}", "reproduce clover --out {}", "assess --out {}",
    "family profile digits --out {}", "jobs results a --out {}",
)  # fmt: skip


def asked(command: str, path: Path) -> Result:
    return CliRunner().invoke(app, [word.replace("{}", str(path)) for word in command.split()])


def in_one(refused: Result) -> None:
    assert refused.exit_code == 2, (refused.output, refused.exception)
    assert isinstance(refused.exception, SystemExit), "a traceback"
    last = refused.output.strip().splitlines()[-1]
    assert last.startswith("trefoil: ")
    assert "Remedy: " in last
    assert "[Errno" not in last


@contextmanager
def as_other_user() -> Iterator[None]:
    """Root may do everything: as root, the effective user is changed meanwhile."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(OTHER_USER)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.mark.parametrize("command", READS)
def test_a_path_that_cannot_be_read_is_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x\n")
    for path in (tmp_path, tmp_path / "file" / "below", tmp_path / ("n" * 300), tmp_path / "absent"):
        in_one(asked(command, path))


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_that_cannot_be_used_is_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x\n")
    for path in (tmp_path / "file", tmp_path / ("n" * 300)):
        in_one(asked(command, path))


@pytest.mark.parametrize("command", WRITES)
def test_a_result_that_could_not_be_written_is_refused_before_the_work(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x\n")
    (tmp_path / "of_another").mkdir(mode=0o555)
    refused = [asked(command, path) for path in (tmp_path / "file" / "below", tmp_path / ("n" * 300))]
    with as_other_user():
        refused.append(asked(command, tmp_path / "of_another" / "below"))
    for one in refused:
        in_one(one)
        assert "cannot be written" in one.output


@pytest.mark.parametrize("command", STRANGE_READS)
def test_a_file_that_is_none_of_the_kind_is_one_line(command: str, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    (tmp_path / "own.json.toml").touch()
    packed = io.BytesIO()
    np.savez(packed, images=np.zeros((9, 8, 8), np.uint8), labels=np.zeros(9))
    for data in (b"", b"\xff\xfe{}", 100_000 * b"[", b"NaN", b"\0", packed.getvalue()[:-40], packed.getvalue()[:99]):
        path.write_bytes(data)
        in_one(asked(command, path))
    for data in (np.zeros(3), np.array("x")):
        np.save(path, data)
        Path(f"{path}.npy").rename(path)
        in_one(asked(command, path))


@pytest.mark.parametrize("command", [*READS, *STRANGE_READS, "assess --prometheus http://127.0.0.1:1 --tls-ca {}"])
def test_a_fifo_keeps_no_command_waiting(command: str, tmp_path: Path) -> None:
    """Opening one waits for a writer, which never comes."""
    path = tmp_path / "own.json"
    os.mkfifo(path, 0o600)
    (tmp_path / "own.json.toml").touch()
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(60)
    try:
        in_one(asked(command, path))
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("command", [*READS, *FOLDERS])
def test_links_in_a_circle_are_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    in_one(asked(command, tmp_path / "loop"))


@pytest.mark.parametrize("command", [*READS, *FOLDERS[1:]])
def test_no_permission_is_one_line(command: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "inside" / "state" / "run").mkdir(parents=True)
    (closed / "inside" / "state" / "run" / "launch.json").write_text("{}")
    closed.chmod(0)
    try:
        with as_other_user():
            in_one(asked(command, closed / "inside"))
    finally:
        closed.chmod(0o700)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_cannot_be_made_is_one_line(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    for command in ("up --state-dir {}/state", "simulate digits --set duration_s=1 --out {}/out"):
        refused = asked(command, tmp_path)
        in_one(refused)
        assert f"({os.strerror(number)})" in refused.output
        assert SYSTEM_REMEDIES[number] in refused.output


@pytest.mark.parametrize(
    ("address", "words"), [("127.0.0.1:1", "Connection refused"), ("no-such-host.invalid:1", "no-such-host.invalid:1")]
)
def test_an_address_without_an_answer_is_one_short_line(address: str, words: str, tmp_path: Path) -> None:
    refused = asked(f"status --controller {address}", tmp_path)
    in_one(refused)
    assert words in refused.output
    assert "last error" not in refused.output
    assert len(refused.output) < 300


def test_the_formatter_names_what_was_done_with_which_path_and_what_mends_it() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x")
    said = system_error(DiskUnavailable, full, "be written", "/x", remedy="-", so="the old one stays")
    assert str(said) == (
        "file = '/x': cannot be written (No space left on device): the old one stays. Remedy: make room on that disk"
    )
    taken = listen_error(OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)), "127.0.0.1:80")
    assert isinstance(taken, PortInUse)
    assert str(taken).startswith("address = '127.0.0.1:80': cannot listen (Address already in use). Remedy: stop what")
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert str(listen_error(unknown, "x:1")).endswith(f"cannot listen (Name or service not known). Remedy: {NO_NAME}")


def test_what_no_part_has_turned_into_its_own_error_is_one_line_and_a_bug_is_not() -> None:
    words = r"^file = '/n': cannot be used .File name too long.[.] Remedy: name a shorter path$"
    with pytest.raises(StartError, match=words), in_one_line():
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "/n")
    full = r"^file = '/s': cannot be used .No space left on device.[.] Remedy: make room on that disk$"
    with pytest.raises(StartError, match=full), in_one_line("/s"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(StartError, match=r"^Too many open files[.] Remedy: raise the limit"), in_one_line():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for bug in (TimeoutError(), BrokenPipeError(errno.EPIPE, "Broken pipe"), KeyError("x")):
        with pytest.raises(type(bug)), in_one_line():
            raise bug
