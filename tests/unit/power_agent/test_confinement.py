"""As whom Tritons run that are processes, and what they see."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from power_agent.runtimes import confinement
from power_agent.runtimes.confinement import (
    UID_RANGE,
    UID_RANGES,
    Confinement,
    find_confinement,
    free_user,
    hidden_folders,
    needed_paths,
    refuse_taken_users,
)
from power_agent.runtimes.factory import build_runtime, confine
from power_agent.runtimes.process import ProcessRuntime
from power_agent.settings import PowerAgentSettings
from power_agent.triton.slice_launch import SliceLaunch
from trefoil.core.errors import SettingError, StartError
from trefoil.runtime import proc

OTHER = proc.Identity(1, 1)


@pytest.fixture
def tree(tmp_path):
    """A folder that others may enter, and in it one that they may not."""
    for folder in ("closed/python/bin", "closed/models/digits/1", "closed/other", "state/slices", "open/triton/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in (*tmp_path.parents[:2], tmp_path):  # those of pytest are 0700
        folder.chmod(0o755)
    (tmp_path / "closed").chmod(0o700)
    yield tmp_path
    (tmp_path / "closed").chmod(0o755)


def launch(tree: Path, **changes: object) -> SliceLaunch:
    values = {
        "argv": (str(tree / "open/triton/bin/tritonserver"), f"--cache-directory={tree / 'open'}", "--grpc-port=1"),
        "env": {"PATH": f"{tree / 'open/triton/bin'}{os.pathsep}/usr/bin"},
        "cwd": tree / "state/slices",
        "repository": tree / "state/slices",
        "grpc_target": "127.0.0.1:8200",
        "metrics_url": "",
        "published_target": "",
        "published_metrics_url": "",
        "shm_prefix": "",
        "source": tree / "closed/models",
    }
    return SliceLaunch(**{**values, **changes})  # type: ignore[arg-type]


def test_a_folder_that_others_may_not_enter_shows_only_what_is_needed_of_it(tree):
    shown = (tree / "closed/python", tree / "closed/models", tree / "closed/models/digits", tree / "open/triton")
    assert hidden_folders(shown, ()) == {
        str(tree / "closed"): (str(tree / "closed/models"), str(tree / "closed/python"))
    }


def test_the_state_directory_is_hidden_but_for_the_slice(tree):
    hidden = hidden_folders((tree / "state/slices",), (tree / "state", tree / "open"))
    assert hidden == {str(tree / "state"): (str(tree / "state/slices"),), str(tree / "open"): ()}
    assert hidden_folders((tree / "state/slices",), (tree, tree / "state")) == {
        str(tree): (str(tree / "state/slices"),)
    }


def test_an_interpreter_is_needed_with_what_it_was_installed_with(tree):
    (tree / "closed/python/bin/python3.11").touch()
    (tree / "open/triton/bin/python3").symlink_to(tree / "closed/python/bin/python3.11")
    (tree / "closed/models/albert").symlink_to(tree / "closed/other")
    needed = needed_paths(launch(tree))
    assert {tree / "open/triton", tree / "closed/python", tree / "closed/models", tree / "closed/other"} <= {*needed}
    assert tree / "closed" not in needed


def test_root_is_asked_for_where_each_slice_must_have_a_user(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SettingError, match=r"triton_user = 'own': the agent is user 1000\. Remedy: start it as root"):
        find_confinement("own", 1_000_000, tmp_path)
    found = find_confinement("auto", 1_000_000, tmp_path)
    assert found.uid_base == 0
    assert found.missing.startswith(
        "not isolated, models run as the agent's own user: the agent is user 1000. Remedy: "
    )


def test_a_kernel_that_refuses_is_quoted(tmp_path, monkeypatch):
    def refused(child, spec):
        child.kill()
        return "[Errno 1] unshare: Operation not permitted"

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(confinement, "become", refused)
    found = find_confinement("auto", 1_000_000, tmp_path)
    assert found.uid_base == 0
    assert "Operation not permitted. Remedy: allow the agent mount namespaces and CAP_SYS_ADMIN" in found.missing


def test_where_the_machines_lock_cannot_be_written_users_are_locked_in_the_state_directory(tmp_path, monkeypatch):
    """/run of a container with a read-only root, and of a unit with ProtectSystem=strict."""
    machine, own, really_open = tmp_path / "machine.lock", tmp_path / "state" / "machine.lock", os.open

    def open_read_only(path, *flags):
        if path == machine:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return really_open(path, *flags)

    monkeypatch.setattr(confinement, "USERS_LOCK", machine)
    monkeypatch.setattr(os, "open", open_read_only)
    with (
        pytest.raises(StartError, match=r"machine\.lock.*Read-only file system"),
        Confinement(2_000_000_000).choosing(),
    ):
        pass
    own.parent.mkdir()
    with Confinement(2_000_000_000, own.parent).choosing():
        again = really_open(own, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(again)


@pytest.mark.parametrize(("field", "value"), [("admin_address", "0.0.0.0:8103"), ("triton_listen", "0.0.0.0")])
def test_what_is_not_isolated_is_not_reached_from_other_machines(tmp_path, field, value):
    values = {"runtime": "process", "triton_user": "same", "state_dir": tmp_path, "insecure": True}
    with pytest.raises(SettingError, match=rf"{field} = '{value}.*not isolated.*others reach it\. Remedy: .*auto"):
        build_runtime(PowerAgentSettings(**values | {field: value}), None)
    runtime = build_runtime(PowerAgentSettings(**values), None)
    assert isinstance(runtime, ProcessRuntime)
    assert runtime.missing(gpus=True)["isolate"].startswith(
        "not isolated, models run as the agent's own user: triton_user"
    )


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="a PID namespace needs root on Linux")
def test_tritons_in_another_container_may_be_reached_from_other_machines(tmp_path: Path) -> None:
    settings = PowerAgentSettings(
        node_socket=tmp_path / "node.sock", state_dir=tmp_path, admin_address="0.0.0.0:8103", triton_user="same"
    )
    code = "import json, sys; from power_agent.runtimes.factory import *; "
    code += "print(confine(PowerAgentSettings(**json.loads(sys.argv[1]))).missing)"
    with socket.socket(socket.AF_UNIX) as node:
        node.bind(str(settings.node_socket))
        node.listen()
        with pytest.raises(SettingError, match="others reach it"):  # beside the agent: it sees what the agent has
            confine(settings)
        given = settings.model_dump_json(include=settings.model_fields_set)
        argv = ["unshare", "--pid", "--fork", sys.executable, "-c", code, given]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "in the container of the simulated node" in done.stdout


def test_users_that_others_have_are_refused_before_a_start_and_one_range_above_is_taken() -> None:
    first = 2_000_008_200
    taken = {first + n * UID_RANGE: OTHER for n in range(UID_RANGES - 1)}
    assert free_user(2_000_000_000, 8200, {}) == first
    assert free_user(2_000_000_000, 8200, taken) == first + (UID_RANGES - 1) * UID_RANGE
    taken[first + (UID_RANGES - 1) * UID_RANGE] = OTHER
    with pytest.raises(StartError, match=f"process 1 runs as user {first}.*Remedy: stop what runs there"):
        free_user(2_000_000_000, 8200, taken)


def test_who_is_not_root_gives_tritons_no_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        proc, "users", lambda: dict.fromkeys(range(100, 100 + UID_RANGES * UID_RANGE, UID_RANGE), OTHER)
    )
    with pytest.raises(StartError, match="triton_uid_base"):
        refuse_taken_users(0, [100])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refuse_taken_users(0, [100])
