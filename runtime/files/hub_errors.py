"""Turns errors of huggingface_hub and of the network into one-line errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from megatrain.simulator.base.errors import UserError

_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "huggingface_hub")


@contextlib.contextmanager
def hub_errors(refusal: Callable[[str], UserError]) -> Iterator[None]:
    """Raises `refusal(reason)` instead of an error of huggingface_hub or of the network in the
    block. `reason` is one line of text.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        known = isinstance(error, OSError | ValueError | RuntimeError)
        if not known and type(error).__module__.partition(".")[0] not in _LIBRARIES:
            raise
        raise refusal(_reason(error)) from None


def _reason(error: Exception) -> str:
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    token = "" if get_token() else "; there is no token"
    if isinstance(error, GatedRepoError):
        return f"access must be requested on its page{token}"
    if isinstance(error, RepositoryNotFoundError):
        return f"it does not exist or is private{token}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
