"""Callbacks: the callbacks of a training, in the order in which the trainer calls them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from megatrain.runtime.training.callback import Callback, CallbackError
from megatrain.runtime.training.training_run import TrainingRun
from megatrain.simulator.base.errors import RunError, UserError


class Callbacks:
    """The callbacks of a training, in the order in which the trainer calls them."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def notify(self, event: str, *details: object) -> None:
        """Calls the method `event` of every callback.

        Raises a UserError or RunError of a callback unchanged, because its message is already one
        line for the user. Raises CallbackError for any other exception.
        """
        for callback in self._callbacks:
            _notify_one(callback, event, *details)

    def end(self, trainer: TrainingRun, error: BaseException | None) -> None:
        """Calls `on_end` of every callback, even if some of them fail.

        If `error` is None, raises the first failure of a callback.
        """
        failure = error
        for callback in self._callbacks:
            try:
                _notify_one(callback, "on_end", trainer, failure)
            except BaseException as raised:
                failure = failure or raised
        if failure is not None and failure is not error:
            raise failure


def _notify_one(callback: Callback, event: str, *details: object) -> None:
    """Calls the method `event` of `callback`, with the errors of `Callbacks.notify`."""
    try:
        getattr(callback, event)(*details)
    except (UserError, RunError):
        raise
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise CallbackError(
            f"callback {type(callback).__name__}.{event}: {type(error).__name__}: {first_line}"
        ) from error


def refuse_callbacks(callbacks: object) -> None:
    """Raises UserError unless `callbacks` is a list of callbacks, each without a method `on_...`
    that the trainer would never call.
    """
    if not isinstance(callbacks, Sequence):
        raise UserError(
            "training: callbacks",
            found=f"a {type(callbacks).__name__}",
            allowed="a list of callbacks",
            fix="put it in a list",
        )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            is_class = isinstance(callback, type)
            raise UserError(
                "training: callbacks",
                found=f"class {callback.__name__}" if is_class else f"a {type(callback).__name__}",
                allowed="instances of subclasses of Callback",
                fix=f"pass {callback.__name__}()" if is_class else "derive its class from Callback",
            )
        for owner in type(callback).__mro__:
            if issubclass(owner, Callback):  # other base classes may have other callers
                for name, value in vars(owner).items():
                    if name.startswith("on_") and callable(value) and not hasattr(Callback, name):
                        raise _unknown_method(owner.__name__, name)


def _unknown_method(owner: str, name: str) -> UserError:
    """Returns the error of a callback's method that the trainer would never call."""
    known = [each for each in vars(Callback) if each.startswith("on_")]
    near = difflib.get_close_matches(name, known, n=1)
    return UserError(
        f"training: callback {owner}",
        found=f"a method {name}, which is never called",
        allowed=", ".join(known),
        fix=f"rename it to {near[0]}" if near else "give it a name that does not begin with on_",
    )
