"""Processes that outlive the one who started them, and what they may compute on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from power_agent.devices.gpus import boot_id
from power_agent.runtimes import launcher
from power_agent.runtimes.cgroup import Cgroups, find_cgroups
from power_agent.runtimes.confinement import UID_RANGE, Confinement, find_confinement
from power_agent.runtimes.process import ProcessRuntime
from power_agent.triton.slice_launch import LAUNCHED_AS, SliceLaunch
from tests.support.runtime_contract import Kit, end_all, listens, only, until
from trefoil.core.errors import StartError
from trefoil.runtime import proc
from trefoil.runtime.clock import WallClock

pytestmark = [pytest.mark.integration]

# An agent that starts one process and is killed before it can do anything else.
AGENT = """
import json, os, signal, sys
from pathlib import Path
from power_agent.devices.gpus import boot_id
from power_agent.runtimes.cgroup import Cgroups
from power_agent.runtimes.process import ProcessRuntime
from power_agent.triton.slice_launch import SliceLaunch
from trefoil.runtime.clock import WallClock
folder, launch = Path(sys.argv[1]), json.loads(sys.argv[2])
launch = SliceLaunch(**{**launch, **{name: Path(launch[name]) for name in ("cwd", "repository", "source")}})
runtime = ProcessRuntime(folder, Cgroups(0, {}, {}), WallClock(), boot_id())
runtime.start("a.g1", launch, folder / "log")
os.kill(os.getpid(), signal.SIGKILL)
"""
# Two processes that want a core each, and say what they got in the same 2 s.
BURN = """
import os, sys, time
start_s = time.monotonic()
child = os.fork() if sys.argv[1] == "both" else 0
used_s = time.process_time()
while time.monotonic() - start_s < 2:
    pass
with open(f"{os.getpid()}", "w") as file:
    file.write(f"{(time.process_time() - used_s) / 2} {sorted(os.sched_getaffinity(0))}")
os.rename(f"{os.getpid()}", f"used.{os.getpid()}")
if child:
    os.wait()
"""
GETTERS = """
import os
with open("status", "w") as file:
    file.write(open("/proc/self/status").read())
os.rename("status", "said")
"""


# What a fled process does: it holds the port, as a Triton would.
HOLD = """
import socket, sys
host, port = sys.argv[1].split(":")
door = socket.socket()
door.bind((host, int(port)))
door.listen()
while True:
    caller, _ = door.accept()
    caller.send(b'!')
    caller.recv(1)
    caller.close()
"""
FLEE = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    os.execve(sys.executable, ["held", "-c", *sys.argv[1:]], {})
signal.pause()
"""
UID_BASE = 2_110_000_000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a user of its own needs root")


@pytest.fixture(scope="module")
def cgroups() -> Iterator[Cgroups]:
    found = find_cgroups(f"test-{os.getpid()}")
    yield found
    assert not any(folder.exists() for folder in found.parents.values())


@pytest.fixture
def kit(cgroups: Cgroups, tmp_path: Path) -> Iterator[Kit]:
    def again(groups: Cgroups = cgroups) -> ProcessRuntime:
        return ProcessRuntime(tmp_path / "runtime", groups, WallClock(), boot_id())

    yield Kit(again, sys.executable, tmp_path)
    end_all(again())


@pytest.fixture
def confined_kit(cgroups: Cgroups, tmp_path: Path) -> Iterator[Kit]:
    def again() -> ProcessRuntime:
        return ProcessRuntime(tmp_path / "runtime", cgroups, WallClock(), boot_id(), confinement)

    confinement = find_confinement("own", UID_BASE, tmp_path)
    yield Kit(again, sys.executable, tmp_path)
    end_all(again())


@pytest.mark.gate
def test_it_survives_the_agents_sigkill_and_its_end_is_noticed_by_the_next(kit):
    launch = kit.launch()
    shown = {name: getattr(launch, name) for name in launch.__slots__}
    words = [sys.executable, "-c", AGENT, str(kit.folder / "runtime"), json.dumps(shown, default=str)]
    done = subprocess.run(words, timeout=20)
    assert done.returncode == -signal.SIGKILL
    runtime = kit.again()
    found = only(runtime)
    assert found.alive
    until(lambda: listens(launch))
    assert runtime.start("a.g1", launch, kit.log) == found
    os.kill(int(found.id), signal.SIGKILL)
    until(lambda: not only(runtime).alive)
    assert only(runtime).exit_code is None  # it was nobody's child
    until(lambda: not listens(launch))


def test_an_agent_that_dies_before_the_pid_is_written_leaves_no_process(kit):
    """launcher.py becomes the program only when told to, and is told only after the record is written."""
    child = subprocess.Popen([sys.executable, "-I", "-S", launcher.__file__], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == 0


@pytest.mark.gate
def test_a_record_whose_number_somebody_else_got_is_never_signalled(kit):
    runtime = kit.again()
    runtime.start("a.g1", kit.launch(), kit.log)
    runtime.stop("a.g1", 5)
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        path = kit.folder / "runtime" / "a.g1.json"
        stat = proc.read_stat(bystander.pid)
        assert stat is not None
        forged = {"ended": False, "pid": bystander.pid, "start_ticks": stat.start_ticks - 1}
        path.write_text(json.dumps({**json.loads(path.read_text()), **forged}))
        later = kit.again()
        assert not only(later).alive
        later.stop("a.g1", 0)
        path.write_text(json.dumps({**json.loads(path.read_text()), **forged, "boot_id": "another boot"}))
        assert not only(kit.again()).alive
        assert bystander.poll() is None
        assert not proc.Identity(bystander.pid, stat.start_ticks - 1).send(signal.SIGKILL)
        assert proc.Identity(bystander.pid, stat.start_ticks).send(signal.SIGKILL)
        assert bystander.wait(60) == -signal.SIGKILL
    finally:
        bystander.kill()
        bystander.wait()


def test_a_record_that_cannot_be_read_is_set_aside(kit):
    (kit.folder / "runtime").mkdir()
    (kit.folder / "runtime" / "a.g1.json").write_text("{")
    assert kit.again().list() == ()
    assert (kit.folder / "runtime" / "a.g1.json.bad").exists()


def test_a_record_that_names_what_is_not_its_own_touches_none_of_it(kit, cgroups):
    """A user's other processes, a group with others in it, the regions of another Triton."""
    runtime = kit.again()
    runtime.start("a.g1", kit.launch(), kit.log)
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True, user=12345 if os.geteuid() == 0 else None)
    group = kit.folder / "group"
    group.mkdir()
    (group / "cgroup.procs").write_text(f"{bystander.pid}\n")
    region = Path("/dev/shm") / f"trefoil-test-{os.getpid()}-region"
    region.write_bytes(b"")
    path = kit.folder / "runtime" / "a.g1.json"
    named = {
        "uid": proc.real_uid(bystander.pid),
        "groups": [str(group)],
        "shm_prefix": region.name.removesuffix("region"),
    }
    argv = ["tritonserver", "--backend-config=python,shm-region-prefix-name=trefoil-a-1-"]
    path.write_text(json.dumps(json.loads(path.read_text()) | named | {"argv": argv}))
    try:
        end_all(kit.again())
        assert bystander.poll() is None
        assert group.is_dir()
        assert region.exists()
    finally:
        region.unlink(missing_ok=True)
        bystander.kill()
        bystander.wait()


def burn(kit: Kit, runtime: ProcessRuntime, what: str, **limits: object) -> list[tuple[float, str]]:
    """Cores used by each process, and its affinity."""
    folder = kit.folder / "slice"
    launch = replace(kit.launch(), argv=(sys.executable, "-c", BURN, what), **limits)
    for old in folder.glob("used.*"):
        old.unlink()
    runtime.start("burn.g1", launch, kit.log)
    count = 2 if what == "both" else 1
    until(lambda: len(list(folder.glob("used.*"))) == count and not only(runtime).alive)
    runtime.forget("burn.g1")
    said = [path.read_text().split(" ", 1) for path in folder.glob("used.*")]
    return [(float(used), affinity) for used, affinity in said]


def test_a_quota_holds_for_all_processes_of_a_slice_together(kit, cgroups):
    assert "cpu" in cgroups.parents, cgroups.missing  # root has it everywhere this suite runs
    used = burn(kit, kit.again(), "both", cpu_quota=0.5)
    print(f"quota 0.5: two busy processes used {sum(cores for cores, _ in used):.2f} cores")
    assert 0.05 < sum(cores for cores, _ in used) < 0.6  # less where others want these cores too
    assert not (cgroups.parents["cpu"] / "burn.g1").exists()


@pytest.mark.parametrize("by", ["cpuset", "affinity"])
def test_pinned_cores_hold_for_all_processes_of_a_slice(kit, cgroups, by):
    groups = cgroups if by == "cpuset" else Cgroups(0, {}, {})
    runtime = ProcessRuntime(kit.folder / "runtime", groups, WallClock(), boot_id())
    last = max(os.sched_getaffinity(0))
    used = burn(kit, runtime, "both", cpu_cores=(last,))
    assert [affinity for _, affinity in used] == [f"[{last}]"] * 2
    assert sum(cores for cores, _ in used) < 1.1


def test_a_quota_that_cannot_be_had_is_refused_with_the_remedy_and_leaves_nothing(kit):
    groups = Cgroups(1, {}, {"cpu": "cannot make /x: Read-only file system. Remedy: run the agent as root"})
    runtime = ProcessRuntime(kit.folder / "runtime", groups, WallClock(), boot_id())
    with pytest.raises(StartError, match=r"cpu_quota = 0\.5: cannot make /x.*Remedy: run the agent as root$"):
        runtime.start("a.g1", replace(kit.launch(), cpu_quota=0.5), kit.log)
    assert runtime.list() == ()
    assert runtime.missing_resources == {"cpu_quota": groups.missing["cpu"]}
    with pytest.raises(StartError, match=r"a\.g1.*Remedy"):
        kit.again().start("a.g1", replace(kit.launch(), cpu_cores=(4000,)), kit.log)
    assert kit.again().list() == ()


@pytest.mark.gate
def test_a_triton_gets_none_of_the_agents_privileges(kit):
    runtime = kit.again()
    runtime.start("a.g1", replace(kit.launch(), argv=(sys.executable, "-c", GETTERS)), kit.log)
    until(lambda: (kit.folder / "slice" / "said").exists())
    said = dict(line.split(":\t") for line in (kit.folder / "slice" / "said").read_text().splitlines() if ":\t" in line)
    assert {int(said[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert said["NoNewPrivs"] == "1"


@needs_root
def test_what_leaves_its_session_and_its_mark_behind_ends_with_its_user(confined_kit):
    """Model code may clear its environment and lead a separate session: whose it is stays written on it."""
    kit, runtime, launch = confined_kit, confined_kit.again(), confined_kit.launch()
    runtime.start("a.g1", replace(launch, argv=(sys.executable, "-c", FLEE, HOLD, launch.argv[3])), kit.log)
    until(lambda: listens(launch))
    later = kit.again()
    later.stop("a.g1", 5)
    assert not listens(launch)
    assert proc.of_user(UID_BASE + next(iter(launch.ports))) == ()


@needs_root
def test_a_file_that_its_user_may_not_read_is_named_with_the_command_that_opens_it(confined_kit):
    kit, launch = confined_kit, confined_kit.launch()
    source = kit.folder / "models"
    weights = source / "digits" / "1" / "model.onnx"
    weights.parent.mkdir(parents=True)
    weights.touch(0o600)
    (launch.repository / "digits" / "1").mkdir(parents=True)
    (launch.repository / "digits" / "1" / "model.onnx").symlink_to(weights)
    why = rf"may not read it: '{launch.repository}/digits/1/model.onnx'\. Remedy: chmod -R o\+rX {source}; or .*same"
    with pytest.raises(StartError, match=why):
        kit.again().start("a.g1", replace(launch, source=source), kit.log)
    weights.chmod(0o604)
    assert kit.again().start("a.g1", replace(launch, source=source), kit.log).alive


@needs_root
def test_a_user_that_another_process_has_is_not_taken(confined_kit, monkeypatch):
    kit, launch = confined_kit, confined_kit.launch()
    uid = UID_BASE + next(iter(launch.ports))
    other = subprocess.Popen(["sleep", "60"], user=uid)
    try:
        runtime = kit.again()
        started = runtime.start("a.g1", launch, kit.log)
        assert proc.users()[uid].pid == other.pid, "the first user stays the other process's"
        assert proc.of_user(uid + UID_RANGE)[0].pid == int(started.id), "its Triton: one range above"
        runtime.stop("a.g1", 5)
        assert other.poll() is None
        monkeypatch.setattr("power_agent.runtimes.confinement.UID_RANGES", 1)
        with pytest.raises(StartError, match=rf"triton_uid_base = {UID_BASE}: process {other.pid} runs as user {uid}"):
            runtime.start("a.g2", launch, kit.log)
    finally:
        other.kill()
        other.wait()


@needs_root
def test_two_agents_that_start_at_once_never_share_a_user(confined_kit, cgroups, tmp_path):
    """Two Trefoils of one machine, say in two network namespaces: the same ports, so the same first choice."""
    launch = replace(confined_kit.launch(), argv=(sys.executable, "-c", "import time; time.sleep(60)"))
    confinement = find_confinement("own", UID_BASE, tmp_path)
    runtimes = [
        ProcessRuntime(tmp_path / name, cgroups, WallClock(), boot_id(), confinement) for name in ("runtime", "other")
    ]
    try:
        with ThreadPoolExecutor() as pool:
            started = list(pool.map(lambda runtime: runtime.start("a.g1", launch, confined_kit.log), runtimes))
        users = {identity.pid: uid for uid, identity in proc.users().items()}
        assert len({users[int(one.id)] for one in started}) == 2
    finally:
        end_all(runtimes[1])


def test_a_log_is_bounded_while_it_is_written_and_loses_no_line(kit):
    groups = Cgroups(0, {}, {})
    runtime = ProcessRuntime(kit.folder / "runtime", groups, WallClock(), boot_id(), log_mib=2)
    talk = "import sys,time\nfor i in range(3 * 2**20 // 64): print(f'{i:063d}')\nsys.stdout.flush(); time.sleep(60)"
    runtime.start("a.g1", replace(kit.launch(), argv=(sys.executable, "-c", talk)), kit.log)
    until(lambda: kit.log.stat().st_size == 3 * 2**20)
    runtime.list()
    kept = Path(f"{kit.log}.1").read_bytes() + kit.log.read_bytes().lstrip(b"\0")
    assert kept.decode().splitlines() == [f"{i:063d}" for i in range(3 * 2**14)]
    assert kit.log.stat().st_size <= 2**12


def test_a_list_does_not_wait_for_a_stop(kit):
    runtime = kit.again()
    launch = kit.launch("ignore")
    runtime.start("a.g1", launch, kit.log)
    until(lambda: listens(launch))
    stopping = threading.Thread(target=runtime.stop, args=("a.g1", 3.0))
    stopping.start()
    runtime.list()
    assert stopping.is_alive(), "it waits three seconds before it kills"
    stopping.join()
    assert not only(runtime).alive


# --- its files are lost while its Tritons serve -----------------------------------------------------------------------


def launched_as(launch: SliceLaunch, name: str) -> SliceLaunch:
    return replace(launch, env={**launch.env, LAUNCHED_AS: name, "CUDA_VISIBLE_DEVICES": "MIG-1"}, gpu_uuid="MIG-1")


def owner_runtime(folder: Path, owner: str, confinement: Confinement | None = None) -> ProcessRuntime:
    return ProcessRuntime(folder, Cgroups(0, {}, {}), WallClock(), boot_id(), confinement, owner=owner)


@pytest.mark.gate
def test_tritons_whose_files_are_lost_are_found_by_what_they_were_launched_as(kit, tmp_path):
    owner = f"test-{os.getpid()}/node0"
    first = owner_runtime(tmp_path / "runtime", owner)
    launch, other = launched_as(kit.launch(), f"{owner}/a.g1"), launched_as(kit.launch(), f"{owner}9/a.g1")
    was = first.start("a.g1", launch, kit.log)
    foreign = kit.again()
    foreign.start("b.g1", other, kit.log)
    shutil.rmtree(tmp_path / "runtime")
    try:
        [found] = owner_runtime(tmp_path / "runtime", owner).list()
        assert (found.tag, found.id, found.incarnation, found.alive) == (was.tag, was.id, was.incarnation, True)
        assert (found.owner, found.argv, found.gpu_uuid) == (owner, tuple(launch.argv), "MIG-1")
        again = owner_runtime(tmp_path / "runtime", owner)  # by its new file
        assert [(one.tag, one.owner) for one in again.list()] == [("a.g1", owner)]
        again.stop("a.g1", 5)
        until(lambda: not listens(launch))
        until(lambda: listens(other))
    finally:
        os.kill(int(was.id), signal.SIGKILL) if listens(launch) else None
        foreign.stop("b.g1", 5)
        foreign.forget("b.g1")


@pytest.mark.parametrize(
    "lie",
    [
        {"pid": 0},
        {"pid": 2**22 - 1},
        {"pid": "other"},
        {"start_ticks": 5},
        {"boot_id": "other-boot"},
        {"ended": True, "exit_code": 0},
        {"uid": 4242},
        {"groups": ["/sys/fs/cgroup"]},
        {"tag": "c.g9"},
        {"mark": "forged"},
        {"shm_prefix": ""},
        {"log_path": "/etc/passwd"},
    ],
    ids=str,
)
def test_a_record_that_says_another_process_loses_no_triton_and_ends_no_other(kit, tmp_path, lie):
    owner, bystander = f"test-{os.getpid()}/node0", None
    first = owner_runtime(tmp_path / "runtime", owner)
    was = first.start("a.g1", launched_as(kit.launch(), f"{owner}/a.g1"), kit.log)
    other = first.start("b.g1", launched_as(kit.launch(), f"{owner}/b.g1"), kit.log)
    file = tmp_path / "runtime" / "a.g1.json"
    written = json.loads(file.read_text())
    if lie.get("pid") == "other":
        lie = {"pid": int(other.id), "start_ticks": proc.Identity.of_pid(int(other.id)).start_ticks}
    if "uid" in lie and os.geteuid() == 0:
        bystander = subprocess.Popen(["sleep", "60"], user=4242)
    file.write_text(json.dumps(written | lie))
    again = owner_runtime(tmp_path / "runtime", owner)
    try:
        found = {one.tag: one.id for one in again.list() if one.alive}
        assert found == {"a.g1": was.id, "b.g1": other.id}
        again.stop("a.g1", 5)
        assert {one.tag: one.id for one in again.list() if one.alive} == {"b.g1": other.id}
        assert bystander is None or bystander.poll() is None
    finally:
        if bystander is not None:
            bystander.kill()
            bystander.wait()
        end_all(owner_runtime(tmp_path / "runtime", owner))


def test_a_second_process_that_says_it_is_the_same_triton_is_kept_apart_and_alive(kit, tmp_path):
    owner = f"test-{os.getpid()}/node0"
    first = owner_runtime(tmp_path / "runtime", owner)
    was = first.start("a.g1", launched_as(kit.launch(), f"{owner}/a.g1"), kit.log)
    second = subprocess.Popen(
        ["sleep", "60"], env={LAUNCHED_AS: f"{owner}/a.g1", "TREFOIL_RUNTIME_ID": "forged"}, start_new_session=True
    )
    try:
        shutil.rmtree(tmp_path / "runtime")
        found = {one.tag: one.id for one in owner_runtime(tmp_path / "runtime", owner).list()}
        assert found == {"a.g1": was.id, f"a.g1+{second.pid}": str(second.pid)}
        assert second.poll() is None
    finally:
        second.kill()
        second.wait()
        end_all(owner_runtime(tmp_path / "runtime", owner))


@needs_root
def test_a_process_of_another_user_is_nobodys_triton(kit, tmp_path):
    owner = f"test-{os.getpid()}/node0"
    forged = subprocess.Popen(
        ["sleep", "60"],
        env={LAUNCHED_AS: f"{owner}/a.g1", "TREFOIL_RUNTIME_ID": "forged"},
        start_new_session=True,
        user=12345,
    )
    try:
        assert owner_runtime(tmp_path / "runtime", owner).list() == ()
    finally:
        forged.kill()
        forged.wait()
