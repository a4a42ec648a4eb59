"""`trefoil family` whole: commands of a repository, of measuring, and of a running system."""

from collections.abc import Callable, Mapping
from typing import Final

from trefoil.cli.family.commands import app
from trefoil.cli.family.profile_command import profile
from trefoil.cli.family.sensitivity_command import sensitivity
from trefoil.cli.load.generate import generate
from trefoil.cli.operate.control import family_load, family_start, family_stop, family_unload
from trefoil.cli.options import as_moved

VERBS: Final[Mapping[str, Callable[..., None]]] = {
    "generate": generate,
    "profile": profile,
    "sensitivity": sensitivity,
    "load": family_load,
    "unload": family_unload,
    "stop": family_stop,
    "start": family_start,
}
for _name, _verb in VERBS.items():
    app.command(_name)(_verb)
old_generate: Final = as_moved(generate, "generate", "family generate")
old_profile: Final = as_moved(profile, "profile", "family profile")
old_sensitivity: Final = as_moved(sensitivity, "sensitivity", "family sensitivity")

__all__ = ["app", "old_generate", "old_profile", "old_sensitivity"]
