"""One wrong but well-formed value in any key of Redis or in any state file, at any moment: all heals within 10 s.

Several of them in each history of a whole system, half of the values newer than the truth; some keys and files are
gone, and some clocks step by hours before the controller starts again. No service ends; no request
fails but those whose connection a restarted worker held; totals are the joules that the nodes told of; the controller
counts the load again, its last rollout is DONE, and all workers route by its plan.

Not told from the truth, by design, and bounded:
- An energy sample that continues its device's stream in number and time, within what the device can draw: up to
  `SAMPLE_MAX_J` a lie are booked too much, or one true sample too little.
- A load window that continues its worker's stream: its arrivals are planned for until they are forgotten.
- A node's status, an acknowledgement, a carbon reading that are possible: true for as long as they stand, until their
  writer writes again (1 s, 1 s, a poll of the feed).
- Where services have no plan key (a fifth of the histories): a plan whose epoch the lease knows. It is obeyed until the
  leader has led for `BEATEN_S`; requests may fail that long. An older plan is obeyed if its leader dies before it
  writes its own again. So it is with copies of the controller's files in Redis, of an epoch that the lease knows.
- A worker that starts when its table file and what Redis says of plans are both spoilt has no table until Redis is
  put right. An older plan that is signed it routes by: refusing that one as well would leave it without any table.
- Whoever writes to the disk of a service can make it do what that service may do: a file that is right in every respect
  is what the service continues from.

LIES=first:last plays others than the suite does, e.g. LIES=0:10000 pytest tests/simulation/test_lies.py.
"""

import os

import pytest

from tests.support.virtual.lies import history
from tests.support.virtual.promises import told

FIRST, LAST = (int(part) for part in os.environ.get("LIES", "0:10").split(":"))
BLOCK = 10


@pytest.mark.parametrize("first", range(FIRST, LAST, BLOCK))
def test_lies_break_no_promise(first):
    for seed in range(first, min(first + BLOCK, LAST)):
        found, system = history(seed)
        assert not found, f"seed {seed}: {told(found, system.log)}"
        assert sum(system.faults.values()) >= 2
