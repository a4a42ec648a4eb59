"""`python -m tests.support.cores FIRST:LAST [PROCESSES]` plays these seeds and says what broke, and how fast it was.

`WHOLE=1` plays the whole systems of tests/support/virtual instead, with the same line at the end.
"""

import gc
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from tests.support.cores import faults as of_cores
from tests.support.cores import system as cores
from tests.support.virtual import faults as of_whole
from tests.support.virtual import system as whole


def played(seed: int, kind: str) -> tuple[int, list[str], float]:
    """Play one seed: what was broken, and the seconds of CPU that it took."""
    history: Any = whole.history if kind == "whole" else cores.history
    began_s = time.process_time()
    found, _ = history(seed, of_whole.drawn if kind == "whole" else of_cores.drawn)
    return seed, found, time.process_time() - began_s


def main(span: str, processes: str = "1") -> int:
    """Play and print; how many broke a promise."""
    first, last = map(int, span.split(":"))
    kind, began_s, broke, cpu_s = "whole" if os.environ.get("WHOLE") else "cores", time.monotonic(), 0, []
    with ProcessPoolExecutor(int(processes), initializer=gc.disable) as pool:  # `unswept` sweeps
        for seed, found, took_s in pool.map(partial(played, kind=kind), range(first, last), chunksize=10):
            cpu_s.append(took_s)
            if found:
                broke += 1
                print(f"seed {seed}: {'; '.join(found[:3])}", flush=True)
    wall_s, mean_s = time.monotonic() - began_s, statistics.mean(cpu_s)
    print(
        f"{len(cpu_s)} histories, {broke} broke a promise; CPU of one: median {1e3 * statistics.median(cpu_s):.0f} ms, "
        f"mean {1e3 * mean_s:.0f} ms = {60 / mean_s:.0f} a minute and core; "
        f"{60 * len(cpu_s) / wall_s:.0f} a minute on {processes} processes"
    )
    return broke


if __name__ == "__main__":
    raise SystemExit(min(1, main(*sys.argv[1:])))
