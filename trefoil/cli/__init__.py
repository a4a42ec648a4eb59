"""Command line of Trefoil: every command, and what starts and measures whole systems."""

import os

# Our children run only two system calls between fork and exec; gRPC's own fork handlers would only print a
# warning into the live view. Has to be known before gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# What gRPC's core prints besides of a refused connection is in the error's one line.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Numpy's BLAS starts a thread for each core, which spins for 0.1 s; the services that we start inherit one too.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
