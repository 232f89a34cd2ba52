"""Exceptions for mistakes of the user and for runs that stop."""

from __future__ import annotations

import functools


class UserError(Exception):
    """An input of the user that cannot be used. The command prints the error as one line and exits
    with the error's `status`, which is 2.

    The text says where the mistake is, what was found, what is allowed, and how to fix it.

    >>> str(UserError("plan.toml: weight_slots", found="0", allowed=">= 1", fix="set it to 2"))
    'plan.toml: weight_slots: found 0; allowed: >= 1; fix: set it to 2'
    """

    status = 2
    """The exit status of the command."""

    def __init__(self, where: str, *, found: object, allowed: object, fix: str) -> None:
        self.where, self.found, self.allowed, self.fix = where, found, allowed, fix
        text = f"{where}: found {_shortened(found)}; allowed: {allowed}; fix: {fix}"
        super().__init__(" ".join(text.splitlines()))

    def __reduce__(self) -> tuple[functools.partial[UserError], tuple[()]]:
        """Makes it picklable, so that a worker process can send it to its parent."""
        return (
            functools.partial(
                type(self),
                self.where,
                found=str(self.found),
                allowed=str(self.allowed),
                fix=self.fix,
            ),
            (),
        )

    def inside(self, where: str) -> UserError:
        """Returns the same error with `where`, such as a file, in front of its place."""
        return type(self)(
            f"{where}: {self.where}", found=self.found, allowed=self.allowed, fix=self.fix
        )


class DoesNotFit(UserError):
    """A plan or a model that needs more memory than there is. The command exits with status 3, so a
    script can distinguish it from a mistake in the command.
    """

    status = 3


def _shortened(value: object, most: int = 300) -> str:
    """Returns the text of `value`, cut after `most` characters."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."


class RunError(RuntimeError):
    """Training stopped early for a reason that is not a mistake in the plan. The command prints the
    error as one line and exits with status 1.
    """

    status = 1
    """The exit status of the command."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run. The command prints one line and exits with `status`, which is 128
    plus the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number
