"""What /proc shows of a process, at every moment of its life."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dispatcher.jobs.folder import locked
from power_agent.durability.journal import Journal
from trefoil.cli.run.state_directory import StateLock, StatePaths
from trefoil.runtime import proc

MARK = "TREFOIL_TEST=it"
WORDS = b"python3\0-c\0pass\0"
VARIABLES = b"PATH=/bin\0TREFOIL_TEST=it\0"
SPANS = {"cmdline": (45, 46), "environ": (47, 48)}
KERNEL_THREAD, EXITING = 0x00200000, 0x4


class OneProcess:
    """A /proc of one process, written as the kernel shows it, and how often it was waited for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "77"
        self._folder.mkdir()
        self.waits = 0

    def show(
        self,
        words: bytes = b"",
        variables: bytes = b"",
        state: str = "R",
        flags: int = 0,
        at: int = 0,
        code_at: int = 512,
    ) -> None:
        """`at`: where its words begin in its memory; 0 while none is filled. `code_at`: 0 while some is not."""
        fields = [state, "1", "77", "77"] + ["0"] * 46
        fields[6], fields[19] = str(flags), "5000"
        if at:
            fields[23] = str(code_at)
            fields[45:49] = map(str, (at, at + len(words), at + len(words), at + len(words) + len(variables)))
        (self._folder / "stat").write_text(f"77 (a) b) {' '.join(fields)}")
        (self._folder / "cmdline").write_bytes(words)
        (self._folder / "environ").write_bytes(variables)


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneProcess:
    process = OneProcess(tmp_path)

    def wait(identity: proc.Identity, timeout_s: float) -> bool:
        assert (identity, timeout_s > 0) == (proc.Identity(77, 5000), True)
        process.waits += 1
        if process.waits == 3:  # its exec is done
            process.show(WORDS, VARIABLES, at=4096)
        return False

    monkeypatch.setattr(proc, "PROC", tmp_path)
    monkeypatch.setattr(proc.Identity, "wait", wait)
    return process


def test_a_process_in_the_middle_of_an_exec_is_asked_again(one):
    one.show()
    assert proc.read_start_strings(77, "environ") == VARIABLES
    assert one.waits == 3


@pytest.mark.parametrize("also", [(), (77,)])
def test_what_is_in_the_middle_of_an_exec_belongs_to_whom_its_mark_names(one, also):
    one.show()
    assert proc.owned_processes(proc.Identity(9, 1), MARK, also) == (proc.Identity(77, 5000),)


def test_words_are_asked_for_again_as_variables_are(one):
    one.show()
    assert proc.read_start_strings(77, "cmdline") == WORDS


def test_variables_that_are_being_copied_are_not_taken_for_none(one):
    one.show(WORDS, at=4096, code_at=0)
    assert proc.read_start_strings(77, "environ") == VARIABLES
    assert one.waits == 3


def test_an_exec_that_ends_between_two_looks_is_noticed(one):
    one.show(WORDS, VARIABLES, at=4096)
    (proc.PROC / "77" / "environ").write_bytes(b"")  # read before; the stat is read after
    assert proc.read_start_strings(77, "environ") == VARIABLES


@pytest.mark.parametrize(
    "process",
    [
        {"words": WORDS, "at": 4096},
        {"state": "Z"},
        {"flags": KERNEL_THREAD, "state": "I"},
        {"flags": EXITING},
    ],
)
def test_what_has_no_variables_for_good_is_not_waited_for(one, process):
    one.show(**process)
    assert proc.read_start_strings(77, "environ") == b""
    assert one.waits == 0


def test_an_exec_that_does_not_end_is_given_up(one):
    one.waits = 3
    one.show()
    assert proc.read_start_strings(77, "environ") == b""
    assert one.waits == 3 + proc.EXEC_TRIES


def test_what_is_gone_shows_nothing(one):
    assert proc.read_start_strings(78, "environ") == proc.read_start_strings(78, "cmdline") == b""


def test_real_processes_show_what_they_were_given():
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    many = {f"TREFOIL_TEST_{number}": "it" for number in range(3000)}  # which take the kernel a while
    for variables in ({}, {"TREFOIL_TEST": "it"}, *(many for _ in range(20))):
        argv = [sys.executable, "-I", "-S", "-c", code]
        with subprocess.Popen(argv, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            said = proc.read_start_strings(child.pid, "environ"), proc.read_start_strings(child.pid, "cmdline")
            assert child.stdout.readline() == b"up\n"
            assert (
                proc.read_start_strings(child.pid, "environ"),
                proc.read_start_strings(child.pid, "cmdline"),
            ) == said
            child.communicate(b"")
        assert said[0] == b"".join(f"{name}={value}\0".encode() for name, value in variables.items())
        assert said[1] == b"\0".join(map(os.fsencode, argv)) + b"\0"


STRANGE = {
    "a FIFO": os.mkfifo,
    "a folder": lambda path: (path / "inner").mkdir(parents=True),
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "gone" / "x"),
}


def _locked(folder: Path) -> None:
    with locked(folder):
        pass


LOCKS = {
    "lock of a journal": lambda folder: Journal(folder, "boot", "driver").open(),
    "lock of `up`": lambda folder: StateLock(StatePaths(folder)).acquire(),
    ".lock of jobs": _locked,
}


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("lock", LOCKS)
def test_what_is_no_file_at_a_locks_name_is_set_aside(lock, strange, tmp_path):
    path = tmp_path / lock.partition(" ")[0]
    STRANGE[strange](path)
    LOCKS[lock](tmp_path)
    assert os.path.lexists(f"{path}.bad")
    assert path.is_file()
    assert not path.is_symlink()


def test_a_lock_that_cannot_be_written_locks_as_well(tmp_path, monkeypatch):
    path, really_open = tmp_path / "lock", os.open

    def refuse(name: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(name))
        return really_open(name, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError):
        proc.open_lock(path)
    path.touch()
    os.close(proc.open_lock(path))
