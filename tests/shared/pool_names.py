"""Renames the pools of a schedule, to test that their names do not matter."""

from __future__ import annotations

import msgspec

from megatrain.simulator.schedule import Schedule


def with_other_pool_names(schedule: Schedule) -> Schedule:
    """Returns `schedule` with every pool renamed.

    A new name depends only on the old one.
    """

    def renamed(name: str) -> str:
        place, _, rest = name.partition(".")
        pool, _, key = rest.partition(":")
        return f"{place}.x{pool[::-1]}:{key}"

    def all_renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple([renamed(name) for name in names])

    lists = ("reads", "writes", "acquires", "releases")
    return msgspec.structs.replace(
        schedule,
        buffers=tuple(
            [msgspec.structs.replace(each, id=renamed(each.id)) for each in schedule.buffers]
        ),
        ops=tuple(
            [
                msgspec.structs.replace(op, **{key: all_renamed(getattr(op, key)) for key in lists})
                for op in schedule.ops
            ]
        ),
    )
