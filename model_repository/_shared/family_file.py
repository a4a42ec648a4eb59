"""A variant's table of a family.toml, as scripts that train a family write it."""

import hashlib
from pathlib import Path

VARIANT = """
[[variants]]
name = "{name}"
version = {version}
accuracy = {accuracy:.6f}
accuracy_source = "{source}"
memory_mib = {memory_mib}
load_s = {load_s}
macs = {macs}
licence = "{licence}"
sha256 = "{sha256}"
"""


def variant_table(
    folder: Path,
    name: str,
    version: int,
    *,
    accuracy: float,
    source: str,
    memory_mib: int,
    load_s: float,
    macs: int,
    licence: str,
) -> str:
    """Table of the variant whose graph is `version`/model.onnx in its family's folder."""
    digest = hashlib.sha256((folder / str(version) / "model.onnx").read_bytes()).hexdigest()
    return VARIANT.format(
        name=name, version=version, accuracy=accuracy, source=source, memory_mib=memory_mib, load_s=load_s, macs=macs,
        licence=licence, sha256=digest,
    )  # fmt: skip
