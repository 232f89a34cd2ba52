"""Reads the text form of a schedule, the reverse of `Schedule.to_text`."""

from __future__ import annotations

import msgspec

from megatrain.simulator.schedule import Buffer, Op, Schedule

_LISTS = ("after", "reads", "writes", "acquires", "releases")
_NUMBERS = ("offset", "bytes", "parameters", "flops", "elements", "high_priority")


def from_text(text: str) -> Schedule:
    """Returns the schedule of a text that `Schedule.to_text` wrote."""
    first, *lines = text.splitlines()
    buffers, ops = [], []
    for line in lines:
        name, second, *rest = line.split()
        if name == "buffer" and rest:
            size, data, dtype, *flags = rest
            knob = "".join(flag.removeprefix("knob=") for flag in flags if flag.startswith("knob="))
            set_flags = {flag: True for flag in flags if not flag.startswith("knob=")}
            buffers.append(
                msgspec.convert(
                    {
                        "id": second,
                        "bytes": int(size),
                        "data": data,
                        "dtype": dtype,
                        "knob": knob,
                        **set_flags,
                    },
                    Buffer,
                )
            )
            continue
        words = (word.split("=", 1) for word in rest)
        fields = {
            key: (
                tuple(value.split(","))
                if key in _LISTS
                else int(value)
                if key in _NUMBERS
                else value
            )
            for key, value in words
        }
        fields["high_priority"] = bool(fields.get("high_priority"))
        ops.append(msgspec.convert({"id": name, "lane": second, **fields}, Op))
    return Schedule(policy=first.removeprefix("schedule "), buffers=tuple(buffers), ops=tuple(ops))
