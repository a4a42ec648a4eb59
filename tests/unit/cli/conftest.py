"""A running system for tests of commands."""

from tests.support.running_system import running

__all__ = ["running"]
