"""Which control groups are found, what is written into them, and what is said where there are none."""

from pathlib import Path

import pytest

from power_agent.runtimes.cgroup import Cgroups, find_cgroups, member_pids, remove_groups, used_cpu_s
from trefoil.core.errors import StartError


class Tree:
    """A made-up /sys/fs/cgroup with the files that a kernel would put there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts, self.own = root / "mountinfo", root / "cgroup"

    def v1(self, **places: str) -> None:
        lines, own = [], []
        for number, (names, place) in enumerate(places.items()):
            options = names.replace("_", ",")
            lines.append(f"{number} 1 0:{number} / {self.root}/{names} rw - cgroup cgroup rw,{options}")
            own.append(f"{number}:{options}:{place}")
            self.group(self.root / names / place.lstrip("/"), **{"cpuset.cpus": "0-3\n", "cpuset.mems": "0\n"})
        self.mounts.write_text("\n".join(lines))
        self.own.write_text("\n".join(own))

    def v2(self, place: str) -> Path:
        self.mounts.write_text(f"31 1 0:1 / {self.root}/cg rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n")
        self.own.write_text(f"0::{place}\n")
        folder = self.root / "cg" / place.lstrip("/")
        self.group(folder, **{"cgroup.controllers": "cpuset cpu memory\n", "cgroup.subtree_control": ""})
        return folder

    @staticmethod
    def group(folder: Path, **files: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(content)
        return folder

    def find(self, parent: Path | None = None) -> Cgroups:
        return find_cgroups("x", parent, self.mounts, self.own)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def new_cpusets(monkeypatch):
    """As in a kernel, a new group of v1's cpuset has its files, and they are empty."""
    make = Path.mkdir

    def mkdir(self, *args, **options):
        fresh = not self.exists()
        make(self, *args, **options)
        if fresh and (self.parent / "cpuset.cpus").exists():
            for name in ("cpuset.cpus", "cpuset.mems"):
                (self / name).write_text("")

    monkeypatch.setattr(Path, "mkdir", mkdir)


def test_v1_has_a_tree_per_controller_and_new_cpusets_get_what_they_need(tree, new_cpusets):
    tree.v1(cpu_cpuacct="/docker/a", cpuset="/docker/a", memory="/docker/a")
    groups = tree.find()
    assert (groups.version, groups.missing) == (1, {})
    assert groups.parents["cpu"] == tree.root / "cpu_cpuacct/docker/a/trefoil-x"
    (quota,) = groups.create("a.g1", None, 0.3)
    assert (quota / "cpu.cfs_period_us").read_text() == "20000"
    assert (quota / "cpu.cfs_quota_us").read_text() == "6000"
    (pinned,) = groups.create("b.g1", (1, 3), None)
    assert pinned == tree.root / "cpuset/docker/a/trefoil-x/b.g1"
    assert (pinned / "cpuset.cpus").read_text() == "1,3"
    assert (pinned / "cpuset.mems").read_text() == "0"
    assert groups.create("c.g1", None, None) == ()  # a GPU's slice


def test_v2_is_used_beside_the_agents_leaf(tree):
    leaf = tree.v2("/system.slice/power-agent.service/agent")
    unit = leaf.parent
    tree.group(unit, **{"cgroup.subtree_control": "cpu cpuset\n"})
    groups = tree.find()
    assert (groups.version, groups.missing) == (2, {})
    assert groups.parents == {"cpu": unit / "trefoil-x", "cpuset": unit / "trefoil-x"}
    (quota,) = groups.create("a.g1", None, 1.5)
    assert quota == unit / "trefoil-x" / "a.g1"
    assert (quota / "cpu.max").read_text() == "30000 20000"
    (pinned,) = groups.create("b.g1", (0,), None)
    assert (pinned / "cpuset.cpus").read_text() == "0"
    assert not (pinned / "cgroup.subtree_control").exists()  # it holds processes


def test_v2_that_hands_nothing_down_is_named_with_what_to_do(tree):
    folder = tree.v2("/user.slice/session-1.scope")
    tree.group(folder, **{"cgroup.type": "domain\n", "cgroup.procs": "12\n"})
    groups = tree.find()
    assert groups.parents == {}
    assert "session-1.scope does not hand down cpu: it holds processes itself. Remedy: " in groups.missing["cpu"]
    assert "DelegateSubgroup=agent); or" not in groups.missing["cpu"]
    assert "cgroup_parent" in groups.missing["cpu"]
    assert groups.create("a.g1", (0,), None) == ()  # pinned by affinity instead
    with pytest.raises(
        StartError, match=r"cpu_quota = 0\.5: .*it holds processes itself. Remedy: run the agent as root"
    ):
        groups.create("a.g1", None, 0.5)


def test_a_given_parent_comes_first(tree):
    tree.v2("/user.slice/session-1.scope")
    tree.group(tree.root / "cg", **{"cgroup.subtree_control": "memory\n"})
    given = tree.group(tree.root / "cg/trefoil", **{"cgroup.controllers": "cpu\n", "cgroup.subtree_control": ""})
    groups = tree.find(given)
    assert groups.parents["cpu"] == given / "trefoil-x"
    assert (tree.root / "cg/cgroup.subtree_control").read_text() == "+cpuset"  # a kernel adds it to what is there
    assert (given / "cgroup.subtree_control").read_text() == "+cpuset"


def test_without_any_tree_quotas_are_refused(tree):
    tree.mounts.write_text("1 1 0:1 / /proc rw - proc proc rw\n")
    tree.own.write_text("")
    groups = tree.find()
    assert (groups.version, groups.parents) == (0, {})
    assert "no cgroup tree is mounted" in groups.missing["cpuset"]


def test_what_a_killed_agent_made_and_did_not_write_down_is_removed(tree):
    tree.v1(cpu="/")
    groups = tree.find()
    made = tree.group(groups.parents["cpu"] / "a.g1")
    known = tree.group(groups.parents["cpu"] / "b.g1")
    groups.remove_unknown({known})
    assert not made.exists()
    assert known.exists()
    assert remove_groups([known])
    assert not groups.parents["cpu"].exists()


def test_members_of_groups_that_are_gone_are_nobody(tree):
    folder = tree.group(tree.root / "g", **{"cgroup.procs": "12\n34\n"})
    assert member_pids([folder, tree.root / "gone"]) == {12, 34}
    assert not remove_groups([folder])


def test_the_kernels_counter_is_read_in_either_version_and_asked_of_nothing_else(tree, new_cpusets):
    tree.v1(cpu="/a", cpuacct="/a", cpuset="/a")
    groups = tree.find()
    made = groups.create("a.g1", None, 0.3)
    assert made == tuple(tree.root / of / "a/trefoil-x/a.g1" for of in ("cpu", "cpuacct"))
    (made[0] / "cpu.stat").write_text("nr_periods 7\n")
    assert used_cpu_s(made) is None
    (made[1] / "cpuacct.usage").write_text("2500000000\n")
    assert used_cpu_s(made) == 2.5
    assert groups.create("b.g1", None, None) == ()
    of_v2 = tree.group(tree.root / "v2", **{"cpu.stat": "usage_usec 1500000\nuser_usec 1\n"})
    assert used_cpu_s((of_v2,)) == 1.5
    assert used_cpu_s(()) is None


def test_a_cpuacct_that_takes_no_group_is_done_without(tree):
    tree.v1(cpu="/a", cpuacct="/b")
    tree.group(tree.root / "cpuacct/b", **{"trefoil-x": "no folder can be here"})
    groups = tree.find()
    assert set(groups.parents) == {"cpu"}
    assert "cpuacct" not in groups.missing
    assert groups.create("a.g1", None, 0.5) == (tree.root / "cpu/a/trefoil-x/a.g1",)
