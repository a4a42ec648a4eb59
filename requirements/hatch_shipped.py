"""What ships in the wheel beside the packages, in `trefoil/shipped`. What Git ignores, as exported weights, does
not, nor do the scripts that make model files and profiles.

Only in a wheel: in a checkout, and so in an editable install, the top-level folders are used (trefoil/installation.py).
"""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED = (
    "deploy/config",
    "deploy/nftables",
    "model_repository",
    "benchmarks/scenarios",
    "requirements/triton.txt",
    "requirements/triton-server.txt",
)
# In a checkout these make model files and profiles.
MAKE_PROFILES = ("calibrate", "cost_law_fit", "make_profiles")
LEFT_OUT = ("model_repository/_training", *(f"model_repository/_profiles/{name}.py" for name in MAKE_PROFILES))


class Shipped(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        if version != "standard":
            return
        root = Path(self.root)
        for name in SHIPPED:
            files = [root / name] if (root / name).is_file() else sorted((root / name).rglob("*"))
            for path in files:
                where = path.relative_to(root).as_posix()
                if path.is_file() and not where.startswith(LEFT_OUT) and not self.build_config.path_is_excluded(where):
                    build_data["force_include"][str(path)] = f"trefoil/shipped/{where}"
