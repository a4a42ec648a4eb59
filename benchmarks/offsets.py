"""Where a system of its own finds ports, beside other systems of this machine."""

import random
from typing import Final

from trefoil.cli.checks import ports_free
from trefoil.cli.scenario import Ports
from trefoil.core.errors import PortInUse

# Above the ports that tests hand out; inference and Tritons stay below those that the kernel lends by itself.
OFFSETS: Final = range(8000, 20000, 100)


def free_offset(devices: int = 2) -> int:
    """A port offset at which nothing listens; two runs at once rarely ask for the same.

    Raises:
        errors.PortInUse: there is none.
    """
    for offset in random.Random().sample(OFFSETS, len(OFFSETS)):
        try:
            ports_free(Ports().shifted(offset).all(devices))
        except PortInUse:
            continue
        return offset
    raise PortInUse("no free range of ports", remedy="stop other systems on this machine")
