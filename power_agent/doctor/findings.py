"""Findings of the doctor: one line each, with the command that fixes what does not work."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

REMEDY: Final = ". Remedy: "
NONE: Final = "none"  # how a remedy begins where there is nothing to mend


class Verdict(StrEnum):
    """What the doctor says of one thing. WORKS also where it is not needed, or cannot be had on such hardware."""

    WORKS = "works"
    BROKEN = "does not"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, the verdict, what was seen, and what to do about it (empty: nothing)."""

    subject: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def works(subject: str, seen: str) -> Finding:
    """Finding of something that works, or need not."""
    return Finding(subject, Verdict.WORKS, seen)


def broken(subject: str, seen: str, remedy: str) -> Finding:
    """Finding of something that does not work."""
    return Finding(subject, Verdict.BROKEN, seen, remedy)


def unknown(subject: str, seen: str, remedy: str = "") -> Finding:
    """Finding that cannot be determined from here."""
    return Finding(subject, Verdict.UNKNOWN, seen, remedy)


def of_reason(subject: str, why: object, seen: str) -> Finding:
    """Finding of a reason as errors and capabilities word it, `why. Remedy: what to do`; empty: it works, `seen`."""
    reason, _, remedy = str(why).partition(REMEDY)
    if not reason:
        return works(subject, seen)
    if remedy.startswith(NONE):
        without = remedy.removeprefix(NONE).removeprefix(" needed").removeprefix(", ")
        return works(subject, f"{reason}: {without}" if without else reason)
    return broken(subject, reason, remedy)
