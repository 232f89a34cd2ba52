"""Registry: finds scheduling policies by name, built in or from outside the package.

A policy from outside is defined in one of two ways:

* An installed package has an entry point in the group `megatrain.policies`, a subclass of `Policy`
  or an instance of one. A plan gives the name of the entry point, which should be `Policy.name`.
* A `.py` file defines one subclass of `Policy`. A plan gives the path of the file.
"""

from __future__ import annotations

from megatrain.simulator.base.registry import Registry
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
POLICIES: Registry[Policy] = Registry(
    "policy",
    Policy,
    "megatrain.simulator.policies",
    {policy.name: policy for policy in _BUILT_IN},
    group="megatrain.policies",
)
find, registered = POLICIES.find, POLICIES.registered
