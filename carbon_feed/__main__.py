"""`python -m carbon_feed --config carbon_feed.toml`."""

import sys

import uvloop

from carbon_feed.service import build
from trefoil.runtime.service import main

if __name__ == "__main__":
    raise SystemExit(main(build, sys.argv[1:], uvloop.new_event_loop))
