"""What a killed Triton leaves in shared memory goes; what somebody maps, or has only just made, stays."""

import mmap
import os

from power_agent.devices.processes import REGION_PREFIX, sweep_shared_memory


def test_only_old_unmapped_regions_are_removed(tmp_path):
    for name in (f"{REGION_PREFIX}left", f"{REGION_PREFIX}mapped", "something_else"):
        (tmp_path / name).write_bytes(bytes(4096))
    now_s = (tmp_path / f"{REGION_PREFIX}left").stat().st_ctime
    with open(tmp_path / f"{REGION_PREFIX}mapped", "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert sweep_shared_memory(now_s + 5.0, 10.0, tmp_path) == []
        assert sweep_shared_memory(now_s + 11.0, 10.0, tmp_path) == [f"{REGION_PREFIX}left"]
        assert sorted(os.listdir(tmp_path)) == ["something_else", f"{REGION_PREFIX}mapped"]
    assert sweep_shared_memory(now_s + 11.0, 10.0, tmp_path) == [f"{REGION_PREFIX}mapped"]
