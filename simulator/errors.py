"""Mistakes of the user, as one line each: where, what was found, what is allowed, the fix."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave cannot be used. The command prints it as one line and exits with status 2.

    >>> str(UserError("plan.toml: weight_slots", found="0", allowed=">= 1", fix="set weight_slots = 2"))
    'plan.toml: weight_slots: found 0; allowed: >= 1; fix: set weight_slots = 2'
    """

    def __init__(self, where: str, *, found: object, allowed: object, fix: str) -> None:
        super().__init__(f"{where}: found {found}; allowed: {allowed}; fix: {fix}".replace("\n", " "))
