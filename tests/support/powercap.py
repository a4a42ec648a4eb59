"""A powercap tree as the kernel presents it, with packages whose counters a test moves."""

from pathlib import Path

RANGE_UJ = 262_143_328_850


class Powercap:
    """`intel-rapl:<n>` zones named package-<n>, with the sub-zones and neighbours that must not be counted."""

    def __init__(self, root: Path, packages: int = 1, range_uj: int = RANGE_UJ, start_uj: int = 0) -> None:
        self.root = root
        self.range_uj = range_uj
        self.true_uj = [start_uj] * packages
        for number in range(packages):
            self._zone(f"intel-rapl:{number}", f"package-{number}")
            self._zone(f"intel-rapl:{number}:0", "core", 999)
            self._zone(f"intel-rapl:{number}:1", "dram", 999)
            self._zone(f"intel-rapl-mmio:{number}", f"package-{number}", 999)
        self._zone(f"intel-rapl:{packages}", "psys", 999)
        self.show()

    def _zone(self, folder: str, name: str, energy_uj: int = 0) -> None:
        zone = self.root / folder
        zone.mkdir(parents=True)
        (zone / "name").write_text(f"{name}\n")
        (zone / "max_energy_range_uj").write_text(f"{self.range_uj}\n")
        (zone / "energy_uj").write_text(f"{energy_uj}\n")

    def draw(self, *joules: float) -> None:
        """Each package consumes that much."""
        for number, amount in enumerate(joules):
            self.true_uj[number] += round(amount * 1e6)
        self.show()

    def show(self) -> None:
        for number, value in enumerate(self.true_uj):
            (self.root / f"intel-rapl:{number}" / "energy_uj").write_text(f"{value % self.range_uj}\n")
