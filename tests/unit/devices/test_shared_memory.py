"""A killed Triton's shared memory is removed by its own prefix, and nobody else's is."""

from power_agent.simulated.processes import shared_memory_prefix
from power_agent.triton import slice_launch
from power_agent.triton.slice_launch import clean_shared_memory


def test_the_prefix_is_read_from_the_command_line():
    argv = ["tritonserver", "--backend-config=python,shm-region-prefix-name=trefoil-node0-gpu0-3g.20gb-4-8208-"]
    assert shared_memory_prefix(argv) == "trefoil-node0-gpu0-3g.20gb-4-8208-"
    assert shared_memory_prefix(["tritonserver"]) == ""


def test_only_regions_of_the_prefix_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(slice_launch, "SHARED_MEMORY", tmp_path)
    for name in ("trefoil-a-1-x", "trefoil-a-1-y", "trefoil-a-10-x", "other"):
        (tmp_path / name).touch()
    assert clean_shared_memory("") == 0
    assert clean_shared_memory("trefoil-a-1-") == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "trefoil-a-10-x"]
