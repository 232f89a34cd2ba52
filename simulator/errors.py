"""Mistakes of the user, as one line each: where, what was found, what is allowed, the fix."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable


class UserError(Exception):
    """Something the user gave cannot be used. The command prints it as one line and exits with status 2.

    >>> str(UserError("plan.toml: weight_slots", found="0", allowed=">= 1", fix="set weight_slots = 2"))
    'plan.toml: weight_slots: found 0; allowed: >= 1; fix: set weight_slots = 2'
    """

    def __init__(self, where: str, *, found: object, allowed: object, fix: str) -> None:
        self.where, self.found, self.allowed, self.fix = where, found, allowed, fix
        text = f"{where}: found {_shortened(found)}; allowed: {allowed}; fix: {fix}"
        super().__init__(" ".join(text.splitlines()))

    def __reduce__(self) -> tuple[functools.partial[UserError], tuple[()]]:
        """Worker processes send it to their parent."""
        return functools.partial(UserError, self.where, found=str(self.found), allowed=str(self.allowed), fix=self.fix), ()

    def inside(self, where: str) -> UserError:
        """The same mistake, found while reading `where`."""
        return UserError(f"{where}: {self.where}", found=self.found, allowed=self.allowed, fix=self.fix)


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """The fix for a `name` that is not known: up to three known ones that look most like it, or `otherwise` where none does.

    >>> suggestion("qwen2", ["qwen3", "llama"], "check the name")
    'did you mean qwen3?'
    """
    alike = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), sorted(known), 3)
    return f"did you mean {' or '.join(alike)}?" if alike else otherwise


_LONGEST_NAME = 100


def _shortened(value: object, most: int = 300) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."


class RunError(RuntimeError):
    """Training stopped while it was under way, for a reason outside the plan. The command prints it as one line and exits with status 1."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run. The command prints one line and exits with `status`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number
