"""Regenerate the committed stubs: `make protos`. A test runs this into a scratch folder and compares.

Import path equals file path: `from protos.types.v1 import plan_pb2`. Run it as a module (`python -m protos.generate`):
as a script, this folder would come first on sys.path and `protos/types` would shadow the standard library.
"""

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> list[Path]:
    """Write `*_pb2.py`, `*_pb2.pyi` (and `*_pb2_grpc.py` for services) of every .proto below `protos/` to `out`.

    Raises:
        SystemExit: protoc refused a file; its message is on stderr.
    """
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / "protos").rglob("*.proto"))
    messages = [str(path) for path in sources]
    services = [str(path) for path in sources if "types" not in path.parts]
    include = [f"-I{ROOT}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    for args in ([f"--python_out={out}", f"--pyi_out={out}", *messages], [f"--grpc_python_out={out}", *services]):
        if protoc.main(["protoc", *include, *args]) != 0:
            raise SystemExit(1)
    return sorted(out.rglob("protos/**/*_pb2*"))


if __name__ == "__main__":
    for stub in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT):
        print(stub)
