"""`python -m tests.judges record FOLDER` and `... compare FOLDER`: a line a judge, exit code 1 if one differs."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.judges import commands, ports, rendered, simulated, wire

JUDGES: Final[Mapping[str, Callable[..., Iterator[tuple[str, Any]]]]] = {
    "results": simulated.results,
    "plans": simulated.plans,
    "replays": simulated.replays,
    "up": rendered.up,
    "compose": rendered.compose,
    "swarm": rendered.swarm,
    "wire": wire.wire,
    "help": commands.helps,
    "json": commands.answers,
    "ports": ports.ports,
}
"""Each yields names and JSON values; `replays` takes what was recorded."""
ENTRIES_SHOWN: Final = 10  # differing ones of a judge


def difference(before: Any, after: Any) -> str:
    """First difference between two values, with the text around it."""
    texts = [json.dumps(value, indent=1, ensure_ascii=False) for value in (before, after)]
    at = next((n for n, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1), min(map(len, texts)))
    before, after = (repr(text[max(0, at - 100) : at + 140]) for text in texts)
    return f"\n    - {before}\n    + {after}"


def main(argv: list[str]) -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.judges", description=__doc__)
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(JUDGES), help="names of judges, separated by commas")
    options = parser.parse_args(argv)
    differs = False
    for name in options.only.split(","):
        file, began_s = options.folder / f"{name}.json", sum(os.times()[:4])
        recorded = json.loads(file.read_text()) if options.verb == "compare" else {}
        judged = JUDGES[name](recorded) if name == "replays" else JUDGES[name]()
        current = json.loads(json.dumps(dict(judged)))
        size = f"{len(current)} entries, {sum(os.times()[:4]) - began_s:.0f} s of CPU"
        if options.verb == "record":
            options.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(current, indent=1, ensure_ascii=False) + "\n")
            print(f"{name}: recorded, {size}", flush=True)
            continue
        pairs = {key: (recorded.get(key), current.get(key)) for key in {**recorded, **current}}
        changed = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        differs = differs or bool(changed)
        print(f"{name}: {f'{len(changed)} differ' if changed else 'equal'}, {size}", flush=True)
        for key in list(changed)[:ENTRIES_SHOWN]:
            print(f"  {key}{difference(*changed[key])}", flush=True)
    return int(differs)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # sums of floats over sets differ in the last digit
        again = [sys.executable, "-m", "tests.judges", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    logging.disable()
    raise SystemExit(main(sys.argv[1:]))
