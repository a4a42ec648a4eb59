"""Operating errors: what a person can mend. Bugs are assertion failures and crash.

TrefoilError                  one clear line: field, value, remedy
+-- InvalidInput              a value that somebody gave                  INVALID_ARGUMENT, exit 2
|   +-- SettingError          ... in settings, a scenario or a flag
|   +-- CatalogError          ... in family.toml or profile.csv
|   |   +-- ProfileMissing    ... no row for an operating point
|   +-- TraceError            ... in a carbon or arrival trace
|   +-- PlanError             ... in a plan
|   +-- SeriesMismatch        two intensities that must not be compared
+-- Infeasible                an objective that nothing can meet          FAILED_PRECONDITION
+-- Fenced                    a writer that is no longer the holder       FAILED_PRECONDITION
|   +-- StaleRevision         ... a revision older than one seen
+-- NotFound                  a family, zone or node that nobody serves   NOT_FOUND
+-- Unavailable               something that ought to answer does not     UNAVAILABLE
|   +-- StateUnavailable      ... Redis
+-- StartError                a part that cannot start here               exit 2
    +-- PortInUse
    +-- BinaryMissing
"""


class TrefoilError(Exception):
    """One clear line. `field` and `value` name what is wrong, `remedy` what to do."""

    def __init__(self, message: str, *, field: str = "", value: object = None, remedy: str = "") -> None:
        self.field, self.value, self.remedy = field, value, remedy
        head = (
            f"{field} = {value!r}: {message}"
            if field and value is not None
            else f"{field}: {message}"
            if field
            else message
        )
        super().__init__(f"{head}. Remedy: {remedy}" if remedy else head)


class InvalidInput(TrefoilError):
    """A value that somebody gave and that cannot be used."""


class SettingError(InvalidInput):
    """A setting, scenario field or flag."""


class CatalogError(InvalidInput):
    """family.toml or profile.csv."""


class ProfileMissing(CatalogError):
    """No profile row for an operating point; the message names all of its keys."""


class TraceError(InvalidInput):
    """A carbon or arrival trace; the message names file and line."""


class PlanError(InvalidInput):
    """A plan that breaks a rule of `Plan.check`."""


class SeriesMismatch(InvalidInput):
    """Two intensities of different zone, method or factors."""


class Infeasible(TrefoilError):
    """Nothing in the fleet and catalogue can meet the objective; the message says what is closest."""


class Fenced(TrefoilError):
    """A write by a holder whose epoch has been overtaken; the message names both epochs."""


class StaleRevision(Fenced):
    """A command older than one already obeyed."""


class NotFound(TrefoilError):
    """A family, zone or node that nobody serves; the message names those that are served."""


class Unavailable(TrefoilError):
    """A service that ought to answer does not."""


class StateUnavailable(Unavailable):
    """Redis does not answer."""


class StartError(TrefoilError):
    """A part cannot start on this machine."""


class PortInUse(StartError):
    """Somebody else listens there."""


class BinaryMissing(StartError):
    """An executable or shared library is not on this machine."""
