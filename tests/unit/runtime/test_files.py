"""Files on a disk that fails at every single call: as before or as wanted, never half, and again right afterwards."""

import errno
import itertools
import os
import subprocess
import sys

import pytest
import structlog

from tests.support.failing_disk import ERRORS, FailingDisk, fill, small_disk
from trefoil.core.errors import DiskUnavailable
from trefoil.runtime import files
from trefoil.runtime.files import FileTrouble, LineFile, replace_file, replace_files, rotate_log
from trefoil.runtime.telemetry import Metrics


@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize("lasting", [True, False])
def test_a_file_is_replaced_whole_or_stays_as_it_was_at_whatever_call_the_disk_fails(
    tmp_path, monkeypatch, code, lasting
):
    path = tmp_path / "plan.json"
    disk, failed = FailingDisk(monkeypatch, code), 0
    for at in itertools.count():
        disk.mend()
        replace_file(path, "before")
        disk.fail(at, 10**9 if lasting else 1)
        wanted = "after"
        try:
            replace_file(path, wanted)
        except OSError:
            failed, wanted = failed + 1, "before"
        assert path.read_text() == wanted
        assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]
        if disk.calls <= at:
            break
    assert failed >= 3  # opened, written where the rest is refused too, synced, renamed


def test_of_files_that_are_replaced_together_none_is_when_one_cannot_be_written(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("control", "plans")]
    disk = FailingDisk(monkeypatch)
    for at in range(6):  # open, write, sync of both
        disk.mend()
        replace_files(dict.fromkeys(paths, "before"))
        disk.fail(at)
        with pytest.raises(OSError, match="No space"):
            replace_files(dict.fromkeys(paths, "after"))
        assert [path.read_text() for path in paths] == ["before", "before"]


def test_lines_are_whole_or_absent_at_whatever_call_the_disk_fails(tmp_path, monkeypatch):
    disk = FailingDisk(monkeypatch)
    for at, count in itertools.product(range(4), (1, 2, 10**9)):
        file = LineFile(tmp_path / f"lines.{at}.{count}")
        kept = []
        disk.fail(at, count)
        for number in range(8):
            if number == 5:
                disk.mend()
            try:
                file.append(f"line {number}".encode())
            except OSError:
                continue
            kept.append(f"line {number}")
        file.close()
        assert file.path.read_text().split("\n") == [*kept, ""]
        assert kept[-3:] == ["line 5", "line 6", "line 7"]


def test_a_torn_line_of_a_predecessor_is_ended_before_the_next(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"whole\nto")
    file = LineFile(path)
    file.append(b"next")
    file.close()
    assert path.read_bytes() == b"whole\nto\nnext\n"


def test_on_a_real_disk_that_is_full_nothing_is_half_written_and_all_goes_on_when_there_is_room(tmp_path):
    with small_disk(tmp_path / "disk") as folder:
        path, file = folder / "plan.json", LineFile(folder / "lines")
        replace_file(path, "before" * 100)
        file.append(b"one")
        ballast = fill(folder)
        with pytest.raises(OSError, match="No space"):
            replace_file(path, "after" * 3000)
        with pytest.raises(OSError, match="No space"):
            file.append(b"x" * 8192)
        assert (path.read_text(), file.path.read_text()) == ("before" * 100, "one\n")
        ballast.unlink()
        replace_file(path, "after")
        file.append(b"two")
        assert (path.read_text(), file.path.read_text()) == ("after", "one\ntwo\n")
        file.close()
        assert sorted(each.name for each in folder.iterdir()) == ["lines", "plan.json"]


def test_trouble_is_said_once_when_it_begins_and_once_when_it_is_over(tmp_path):
    metrics = Metrics("controller")
    trouble = FileTrouble("plans", "the plan in force stays", metrics)
    with structlog.testing.capture_logs() as log:
        for code in (errno.ENOSPC, errno.ENOSPC, errno.EIO):
            raised = trouble.begin(tmp_path / "plans.json", OSError(code, os.strerror(code)))
        assert 'trefoil_disk_trouble{file="plans",simulated="false"} 1.0' in metrics.text()
        trouble.end()
        trouble.end()
    assert [line["log_level"] for line in log] == ["error", "info"]
    assert isinstance(raised, DiskUnavailable)
    assert "plans.json" in str(raised)
    assert "Remedy: fix that disk; nothing needs to be started again" in str(raised)
    assert 'trefoil_disk_trouble{file="plans",simulated="false"} 0.0' in metrics.text()


TALK = """
import os, sys
for number in range(int(sys.argv[2])):
    os.write(1, f"{sys.argv[1]} {number:059d}\\n".encode())
    if number % 500 == 499:  # not faster than the log is looked at: what outruns that is cut, by design
        os.write(2, b".")
        os.read(0, 1)
"""
KIB = 1024


@pytest.mark.parametrize("no_collapse", [False, True], ids=["as the disk can", "holes"])
def test_no_line_is_lost_or_torn_while_a_log_rotates_under_its_writers(tmp_path, monkeypatch, no_collapse):
    real = files._fallocate
    monkeypatch.setattr(
        files,
        "_fallocate",
        lambda file, mode, n: not (no_collapse and mode == files.COLLAPSE_RANGE) and real(file, mode, n),
    )
    log, copy, whole = tmp_path / "a.log", tmp_path / "a.log.1", b""
    with log.open("ab") as out:
        pipes = {"stdin": subprocess.PIPE, "stdout": out, "stderr": subprocess.PIPE, "bufsize": 0}
        writers = [subprocess.Popen([sys.executable, "-c", TALK, f"w{n}", "20000"], **pipes) for n in range(2)]
    for writer in writers:
        os.set_blocking(writer.stderr.fileno(), False)
    rotations, running = 0, True
    while running:
        running = any(writer.poll() is None for writer in writers)
        for writer in writers:
            if writer.stderr.read(1):
                writer.stdin.write(b".")
        copy.unlink(missing_ok=True)
        rotate_log(log, 512 * KIB)
        if copy.exists():
            rotations, whole = rotations + 1, whole + copy.read_bytes()
            assert copy.stat().st_mode == log.stat().st_mode
        assert log.stat().st_blocks * 512 < 2**21, "the disk has the room again"
    for writer in writers:
        writer.stdin.close()
        writer.stderr.close()
    lines = (whole + log.read_bytes().lstrip(b"\0")).decode().splitlines()
    assert rotations >= 3
    for name in ("w0", "w1"):
        assert [line for line in lines if line.startswith(name)] == [f"{name} {n:059d}" for n in range(20000)]
    assert len(lines) == 40000


def test_a_log_that_grew_faster_than_it_was_looked_at_leaves_two_bounded_files(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * (1000 * KIB))
    rotate_log(log, 64 * KIB)
    assert (tmp_path / "a.log.1").stat().st_size == 128 * KIB
    assert log.stat().st_size <= 4 * KIB
    rotate_log(tmp_path / "none.log", 1)
    rotate_log(log, 64 * KIB)
    assert (tmp_path / "a.log.1").stat().st_size == 128 * KIB, "not while it is small"


def test_a_log_on_a_full_disk_gives_its_room_back(tmp_path):
    with small_disk(tmp_path) as disk:
        log = disk / "a.log"
        fill(disk).rename(log)
        rotate_log(log, 16 * KIB)
        assert log.stat().st_blocks * 512 <= 8 * KIB
        replace_file(disk / "state", "x" * 16 * KIB)


def test_a_link_in_the_place_of_a_rotated_log_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("mine")
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * (100 * KIB))
    (tmp_path / "a.log.1").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        rotate_log(log, 64 * KIB)
    assert (tmp_path / "other").read_text() == "mine"
    assert log.stat().st_size == 100 * KIB
