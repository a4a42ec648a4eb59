"""`python -m carbon_feed --config carbon_feed.toml`."""

from carbon_feed.service import build
from trefoil.runtime.service import main

if __name__ == "__main__":
    raise SystemExit(main(build))
