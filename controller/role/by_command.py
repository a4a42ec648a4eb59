"""What stands by an operator's command, and no longer by the settings."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

FLEET: Final = "fleet_objective"  # under which the watt cap is saved
BY_COMMAND: Final = "by_command"


@dataclass(frozen=True, slots=True)
class ByCommand:
    """What stands by an operator's command: objectives of families, the mode, the fleet's watt cap, and which families
    are stopped: their objectives are kept, and out of service."""

    families: tuple[str, ...] = ()
    mode: bool = False
    max_watts: bool = False
    stopped: tuple[str, ...] = ()

    def after(self, families: Collection[str], max_watts: bool, reset: "ByCommand") -> "ByCommand":
        """What stands by command after a command for these; `reset` goes back to the settings."""
        commanded = {*self.families, *families} - {*reset.families}
        cap = (self.max_watts or max_watts) and not reset.max_watts
        return replace(self, families=tuple(sorted(commanded)), max_watts=cap)


NO_RESET: Final = ByCommand()
