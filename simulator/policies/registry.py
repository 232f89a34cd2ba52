"""Registry: finds scheduling policies by name, built in or from outside the package.

A policy from outside is defined in one of two ways:

* An installed package has an entry point in the group `megatrain.policies`, a subclass of `Policy`
  or an instance of one. A plan gives the name of the entry point, which should be `Policy.name`.
* A `.py` file defines one subclass of `Policy`. A plan gives the path of the file.
"""

from __future__ import annotations

from megatrain.simulator.base.errors import UserError
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
from megatrain.simulator.schedule.plan import Knobs, Placement

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


def _refuse(policy: Policy, where: str) -> None:
    """Raises UserError if a policy from outside has no name, or names an unknown knob or field of
    the placement.
    """
    if not isinstance(getattr(policy, "name", None), str):
        raise UserError(
            f"{where}: name", found="no name", allowed="a string", fix='set name = "my_policy"'
        )
    fields = {"knobs": Knobs.__struct_fields__, "placements": Placement.__struct_fields__}
    for attribute, known in fields.items():
        named = getattr(policy, attribute)
        wrong = named if isinstance(named, str) else sorted({*named} - {*known})
        if wrong:
            raise UserError(
                f"{where}: {attribute}",
                found=repr(wrong),
                allowed=f"a tuple of {', '.join(name for name in known if name != 'placement')}",
                fix=f"name fields that `lower` reads, or leave out {attribute}",
            )


POLICIES: Registry[Policy] = Registry(
    "policy",
    Policy,
    "megatrain.simulator.policies",
    {policy.name: policy for policy in _BUILT_IN},
    group="megatrain.policies",
    refuse=_refuse,
)
find, registered = POLICIES.find, POLICIES.registered
