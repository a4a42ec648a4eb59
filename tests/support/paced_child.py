"""A stand-in for Triton on a simulated slice: books batches in its pace file, then waits. Standard library only.

argv: version, batches, milliseconds per batch, then maybe
    ignore: ignore SIGTERM, and have a child that ignores it too
    until=PATH: after the first batch, wait for that file
"""

import mmap
import os
import signal
import struct
import sys
import time
import zlib

version, batches, batch_ms = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        while True:
            signal.pause()
awaited = [word.removeprefix("until=") for word in sys.argv if word.startswith("until=")]

with open(os.environ["TREFOIL_PACE_FILE"], "r+b") as file:
    page = mmap.mmap(file.fileno(), 0)
at = 64
struct.pack_into("<II", page, at, version, zlib.crc32(b"digits"))
busy_ns = 0
for number in range(1, batches + 1):
    started_ns = time.monotonic_ns()
    struct.pack_into("<Q", page, at + 48, started_ns)
    time.sleep(batch_ms / 1e3)
    busy_ns += time.monotonic_ns() - started_ns
    struct.pack_into("<QQQ", page, at + 8, busy_ns, number, number)
    struct.pack_into("<Q", page, at + 48, 0)
    while awaited and not os.path.exists(awaited[0]):
        time.sleep(0.01)
print("done", flush=True)
while True:
    signal.pause()
