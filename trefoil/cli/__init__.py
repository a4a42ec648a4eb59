"""Command line of Trefoil: every command, and what starts and measures whole systems."""

import os
import sys

# Our children run only two system calls between fork and exec; gRPC's own fork handlers would only print a
# warning into the live view. Has to be known before gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# What gRPC's core prints besides of a refused connection is in the error's one line.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Numpy's BLAS starts a thread for each core, which spins for 0.1 s; the services that we start inherit one too.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# An empty part of PYTHONPATH (`$PYTHONPATH:/x` where it was unset) means the current folder: a `controller/` there
# would be run for ours, `-P` or not. Who wants it writes its path.
_parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if len(_parts) > 1 and not all(_parts):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _parts))
    _ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    if os.getcwd() not in (*_parts, _ours) and os.getcwd() in sys.path:
        sys.path.remove(os.getcwd())
