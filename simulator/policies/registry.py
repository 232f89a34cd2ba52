"""Registry: every scheduling policy by name, built in or from outside the package.

A policy from outside is an instance of a `Policy` subclass that an installed package names under the
entry point group `megatrain.policies`, or a `.py` file that defines one such subclass. A plan names
the first by `Policy.name` and the second by its path.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import sys
from pathlib import Path

from megatrain.simulator.errors import UserError
from megatrain.simulator.policies.double_buffer import DoubleBuffer
from megatrain.simulator.policies.fsdp2_offload import Fsdp2Offload
from megatrain.simulator.policies.k_buffer import KBuffer
from megatrain.simulator.policies.megatrain_code import MegatrainCode
from megatrain.simulator.policies.overlapped import Overlapped
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.policies.resident import Resident
from megatrain.simulator.policies.sequential import Sequential
from megatrain.simulator.policies.zero3_offload import Zero3Offload
from megatrain.simulator.policies.zero_offload import ZeroOffload

GROUP = "megatrain.policies"
_BUILT_IN: tuple[Policy, ...] = (
    DoubleBuffer(),
    Fsdp2Offload(),
    KBuffer(),
    MegatrainCode(),
    Overlapped(),
    Resident(),
    Sequential(),
    Zero3Offload(),
    ZeroOffload(),
)
_BY_NAME = {policy.name: policy for policy in _BUILT_IN}


def registered() -> list[str]:
    """The names of all policies, built in and installed, in alphabetical order."""
    return sorted({*_BY_NAME, *_entry_points()})


def find(name: str) -> Policy:
    """The policy `name`: a registered name, or the path of a `.py` file.

    Raises UserError where there is none, or where loading it fails.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.endswith(".py"):
        return _from_file(name)
    if name in _entry_points():
        return _from_entry_point(name)
    known = sorted(registered(), key=lambda each: each in _BY_NAME and _BY_NAME[each].prediction_only)
    allowed = f"{', '.join(known)}, or the path of a .py file that defines a policy"
    raise UserError("policy", found=repr(name), allowed=allowed, fix="name one of these")


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Installed policies by name; the name of a built-in policy is not taken over."""
    points = importlib.metadata.entry_points(group=GROUP)
    return {point.name: point for point in points if point.name not in _BY_NAME}


@functools.cache
def _from_entry_point(name: str) -> Policy:
    point = _entry_points()[name]
    try:
        loaded = point.load()
    except Exception as error:
        raise _cannot_load(f"entry point {point.value}", error) from error
    return _checked(loaded() if inspect.isclass(loaded) else loaded, f"entry point {point.value}")


@functools.cache
def _from_file(path: str) -> Policy:
    if not Path(path).is_file():
        allowed = "the path of a .py file that defines a policy"
        raise UserError("policy", found=f"no file {path}", allowed=allowed, fix="check the path")
    spec = importlib.util.spec_from_file_location(f"megatrain_policy_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _cannot_load(path, error) from error
    classes = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, Policy) and value.__module__ == spec.name]
    leaves = [each for each in classes if not any(each in other.__bases__ for other in classes)]
    if len(leaves) != 1:
        raise UserError(f"policy {path}", found=f"{len(leaves)} subclasses of Policy", allowed="one", fix="define one policy per file")
    return _checked(leaves[0](), path)


def _checked(policy: object, where: str) -> Policy:
    if not isinstance(policy, Policy):
        raise UserError(f"policy {where}", found=type(policy).__name__, allowed="a subclass of megatrain.simulator.policies.Policy", fix="see docs/adding.md")
    return policy


def _cannot_load(where: str, error: Exception) -> UserError:
    found = f"{type(error).__name__} while it was loaded: {error}".splitlines()[0]
    return UserError(f"policy {where}", found=found, allowed="a module that can be imported", fix="mend the file")
