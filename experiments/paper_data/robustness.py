"""Robustness: which conclusions of the page hold if an input of the predictions is changed. It
takes about 90 s.

Each perturbation changes one input: a rate of every machine, a rate of the GH200, or an assumption
of `experiments/published/settings.toml`. Each conclusion is a statement about predictions that
holds or does not. If a perturbation breaks a conclusion, the conclusion depends on that input.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from megatrain.experiments.paper_data.answers import ours, paper_schedule, stated_format
from megatrain.experiments.paper_data.published_vs_ours import unpublished
from megatrain.experiments.validation.predict import Predicted, predict
from megatrain.experiments.validation.rows import PublishedRow, Setting, load_rows, load_settings
from megatrain.simulator.hardware.machine import AttentionRate, HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

GB_PER_GIB = 2**30 / 1e9


class ChangedSetting(Setting, frozen=True, kw_only=True):
    """A setting with some rates of its machine multiplied or replaced."""

    factors: tuple[tuple[str, float], ...] = ()
    """Rate -> factor: `link`, `dram`, or a field of HardwareSpec."""
    values: tuple[tuple[str, float], ...] = ()
    """Field of HardwareSpec, or `attention` -> value."""

    def machine(self) -> HardwareSpec:
        """Returns the setting's machine with the changed rates."""
        hardware = super().machine()
        for name, factor in self.factors:
            hardware = _scaled(hardware, name, factor)
        for name, value in self.values:
            if name == "attention":
                rates = {
                    kernel: AttentionRate(efficiency=value, half_tokens=known.half_tokens)
                    for kernel, known in hardware.attention.items()
                }
                hardware = msgspec.structs.replace(
                    hardware, attention_efficiency=value, attention=rates
                )
            else:
                hardware = msgspec.structs.replace(hardware, **{name: value})
        return hardware


def _scaled(hardware: HardwareSpec, name: str, factor: float) -> HardwareSpec:
    """Returns the machine with the rate `name` of `ChangedSetting.factors` multiplied."""
    known: dict[str, Any] = {}
    if name == "link":
        known = {f: factor * getattr(hardware, f) for f in ("h2d_gb_per_s", "d2h_gb_per_s")}
        for curve in ("h2d_curve", "d2h_curve", "duplex_curve"):
            known[curve] = tuple((size, factor * rate) for size, rate in getattr(hardware, curve))
    elif name == "dram":
        rates = ("host_gb_per_s", "cpu_adam_per_s", "cpu_update_per_s")
        known = {f: factor * getattr(hardware, f) for f in rates}
        if hardware.host_memory:
            memory = hardware.host_memory
            known["host_memory"] = msgspec.structs.replace(
                memory, gb_per_s=factor * memory.gb_per_s
            )
    else:
        known = {name: min(factor * getattr(hardware, name), _MOST.get(name, math.inf))}
    return msgspec.structs.replace(hardware, **known)


_MOST = {"linear_efficiency": 1.0, "attention_efficiency": 1.0}


class Perturbation(NamedTuple):
    """One changed input."""

    name: str
    """The input and its new value."""
    change: Callable[[str, Setting], Setting]
    """Takes a setting's key and the setting, and returns the changed setting."""
    rates: bool = False
    """Whether it changes a rate of every machine, or nothing. Conclusions about our own plans are
    tried only with such perturbations."""


def _rate(field: str, factor: float, only: str = "") -> Callable[[str, Setting], Setting]:
    """Returns a change that multiplies a rate of every machine, or of the machine `only`."""

    def change(_: str, setting: Setting) -> Setting:
        if only and setting.hardware != only:
            return setting
        return ChangedSetting(**msgspec.structs.asdict(setting), factors=((field, factor),))

    return change


def _value(field: str, value: float, only: str) -> Callable[[str, Setting], Setting]:
    """Returns a change that replaces a field of the machine `only`."""

    def change(_: str, setting: Setting) -> Setting:
        if setting.hardware != only:
            return setting
        return ChangedSetting(**msgspec.structs.asdict(setting), values=((field, value),))

    return change


def _assume(keys: tuple[str, ...], **fields: Any) -> Callable[[str, Setting], Setting]:
    """Returns a change that replaces `fields` of the settings with these keys."""

    def change(key: str, setting: Setting) -> Setting:
        return msgspec.structs.replace(setting, **fields) if key in keys else setting

    return change


PAPERS = ("gh200", "h200-paper", "a100", "a6000", "rtx3090", "h100", "h800")
GH200 = "gh200-96"
PERTURBATIONS = (
    Perturbation("as predicted", lambda _, setting: setting, True),
    Perturbation("link x 0.8", _rate("link", 0.8), True),
    Perturbation("link x 1.25", _rate("link", 1.25), True),
    Perturbation("host DRAM x 0.8", _rate("dram", 0.8), True),
    Perturbation("host DRAM x 1.25", _rate("dram", 1.25), True),
    Perturbation("HBM x 0.8", _rate("device_gb_per_s", 0.8), True),
    Perturbation("products x 0.9", _rate("linear_efficiency", 0.9), True),
    Perturbation("products x 1.1", _rate("linear_efficiency", 1.1), True),
    Perturbation("CPU Adam x 0.5", _rate("cpu_adam_per_s", 0.5), True),
    Perturbation("CPU Adam x 2", _rate("cpu_adam_per_s", 2.0), True),
    Perturbation("one thread x 0.5", _rate("thread_gb_per_s", 0.5), True),
    Perturbation("GH200: CPU Adam 6 G/s", _value("cpu_adam_per_s", 6e9, GH200)),
    Perturbation("GH200: CPU Adam 3 G/s", _value("cpu_adam_per_s", 3e9, GH200)),
    Perturbation("GH200: attention 0.25", _value("attention", 0.25, GH200)),
    Perturbation("GH200: attention 0.555", _value("attention", 0.555, GH200)),
    Perturbation("code with pinned copies", _assume(PAPERS, pinned_copies=True)),
    Perturbation("code packs on one thread", _assume(PAPERS, packs=True)),
    Perturbation("H200 host 1,500 GB", _assume(("h200-paper",), host_memory="1500GB")),
    Perturbation("A100 host 256 GiB", _assume(("a100",), host_memory="256GiB")),
    Perturbation("A100 host 1 TiB", _assume(("a100",), host_memory="1TiB")),
    Perturbation("unstated batch 32", _assume(("gh200", "a100"), batch=32)),
    Perturbation("unstated batch 8", _assume(("gh200", "a100"), batch=8)),
    Perturbation("unstated sequence 512", _assume(("gh200", "a100"), sequence=512)),
    Perturbation("unstated sequence 4,096", _assume(("gh200", "a100"), sequence=4096)),
    Perturbation(
        "3090, A6000: sequence 1,024",
        _assume(("rtx3090", "a6000", "rtx3090-zero3", "a6000-zero3"), sequence=1024),
    ),
    Perturbation("the paper's GB are decimal", lambda _, setting: setting),
)


class World:
    """The predictions under one perturbation."""

    def __init__(self, perturbation: Perturbation) -> None:
        self.perturbation = perturbation
        self.settings = {
            key: perturbation.change(key, setting) for key, setting in load_settings().items()
        }
        self.decimal = perturbation.name == "the paper's GB are decimal"

    def predicted(self, row: PublishedRow) -> Predicted:
        """Returns the prediction for a row that a policy can predict."""
        found = predict(row, self.settings[row.setting])
        assert found is not None, row.item
        return found

    def row(self, item: str, quantity: str = "tflops", **fields: Any) -> Predicted:
        """Returns the prediction for a published row, with `fields` of it replaced."""
        return self.predicted(msgspec.structs.replace(_row(item, quantity), **fields))

    def error(self, item: str, quantity: str) -> float:
        """Returns the signed error of a published row, as a share."""
        published = _row(item, quantity).value
        assert published
        if self.decimal and quantity.endswith("_gib"):
            published /= GB_PER_GIB
        return self.row(item, quantity).value / published - 1


@functools.cache
def _row(item: str, quantity: str) -> PublishedRow:
    return next(row for row in load_rows() if (row.item, row.quantity) == (item, quantity))


class Conclusion(NamedTuple):
    """A statement of the page."""

    name: str
    """The statement."""
    unit: str
    """The unit of the number: `x` (a ratio), `%`, or `GB` (memory to spare)."""
    value: Callable[[World], float]
    """Returns the number that the statement is about."""
    holds: Callable[[float], bool]
    """Returns whether the statement holds with this number."""
    own: bool = False
    """Whether it is about our own plans."""


def _worst(world: World, rows: tuple[tuple[str, str], ...]) -> float:
    """Returns the largest error of the rows (item, quantity) by magnitude, signed, in percent."""
    return 100 * max((world.error(*row) for row in rows), key=abs)


def _spare(setting: str, policy: str, model: str) -> Callable[[World], float]:
    """Returns a function that returns the host memory in GB that a system leaves free. It is
    negative if the system does not fit.
    """

    def spare(world: World) -> float:
        row = unpublished("", setting, policy, model, "host_gib", "GiB", batch=1)
        free = world.settings[setting].machine().host_bytes / 2**30 - world.predicted(row).value
        return free * GB_PER_GIB

    return spare


def _stated_120b(world: World) -> float:
    machine = world.settings["h200-paper"].machine()
    with stated_format() as state:
        found = paper_schedule(ModelSpec.load("gpt-oss-120b"), machine, 1, 1024, state=state)
    return machine.host_bytes / 1e9 - found.host_gib * GB_PER_GIB


def _ratio(code: dict[str, Any], zero3: dict[str, Any]) -> Callable[[World], float]:
    return lambda world: (
        world.row("MegaTrain 14b", **code).value / world.row("ZeRO-3 14b", **zero3).value
    )


def _three_forwards(world: World) -> float:
    machine, code = world.settings["gh200"].machine(), world.row("14b, full")
    with stated_format() as state:
        stated = paper_schedule(ModelSpec.load("qwen2.5-14b"), machine, 96, 1024, state=state)
    return stated.tflops / code.value


def _ours_against(system: str) -> Callable[[World], float]:
    return lambda world: (
        _ours(world.settings["gh200"]) / world.row(system, batch=32, sequence=1024).value
    )


@functools.cache
def _ours(setting: Setting) -> float:
    """Returns the TFLOPS of our best plan for 14B and 32 x 1,024 tokens."""
    work = Workload(batch=32, sequence=1024)
    return ours(ModelSpec.load("qwen2.5-14b"), setting.machine(), work).tflops


SHORT = (
    ("14b, full", "tflops"),
    ("14b, no slab pool", "tflops"),
    ("14b, checkpoint interval 1", "tflops"),
    ("7b, 1K", "step_s"),
    ("7b, 8K", "step_s"),
)
DEPTHS = tuple((f"MegaTrain {layers} layers", "tflops") for layers in (42, 56, 84, 132))
HOSTS = tuple((f"MegaTrain {layers} layers", "rss_gib") for layers in (56, 84, 132, 180))
FILL: dict[str, Any] = {"batch": None, "sequence": None}
"""Changes of a row that let its batch fill the device."""
CONCLUSIONS = (
    Conclusion(
        "MegaTrain's code at 1K and 8K is met within 15 % (Tables 4, 7)",
        "%",
        lambda world: _worst(world, SHORT),
        lambda value: abs(value) <= 15,
    ),
    Conclusion(
        "its speeds by depth are met within 20 % (Figure 5)",
        "%",
        lambda world: _worst(world, DEPTHS),
        lambda value: abs(value) <= 20,
    ),
    Conclusion(
        "its host memory by depth is met within 3 % (Figure 5; an input)",
        "%",
        lambda world: _worst(world, HOSTS),
        lambda value: abs(value) <= 3,
    ),
    Conclusion(
        "its device memory at 14B is missed by more than 15 % (Table 4)",
        "%",
        lambda world: 100 * world.error("14b, full", "device_gib"),
        lambda value: value < -15,
    ),
    Conclusion(
        "256K and 512K are met within 15 % (Table 7)",
        "%",
        lambda world: _worst(world, (("7b, 256K", "step_s"), ("7b, 512K", "step_s"))),
        lambda value: abs(value) <= 15,
    ),
    Conclusion(
        "32K in 32 s is too fast by more than 25 % (Table 7)",
        "%",
        lambda world: 100 * world.error("7b, 32K", "step_s"),
        lambda value: value > 25,
    ),
    Conclusion(
        "the three forward passes cost more than 20 % (Figure 1)",
        "x",
        _three_forwards,
        lambda value: value > 1.2,
    ),
    Conclusion(
        "a second buffer hides less than 5 % by copies alone (Table 4)",
        "x",
        lambda world: world.row("14b, full").value / world.row("14b, no double buffering").value,
        lambda value: value < 1.05,
    ),
    Conclusion(
        "K = 1 at batch 64 costs 5 to 12 % (Table 4)",
        "x",
        lambda world: world.row("14b, full").value / world.row("14b, checkpoint interval 1").value,
        lambda value: 1.05 < value < 1.12,
    ),
    Conclusion(
        "32 sequences each, the code is slower than ZeRO-3 at 14B on a GH200 (the ratio)",
        "x",
        _ratio({"batch": 32, "sequence": 1024}, {"batch": 32, "sequence": 1024}),
        lambda value: value < 1,
    ),
    Conclusion(
        "both batches filled, ZeRO-3 is faster at 14B on a GH200 (Figure 1)",
        "x",
        _ratio(FILL, {}),
        lambda value: value < 1,
    ),
    Conclusion(
        "96 sequences against 4 give 1.84 within 10 % (Figure 1)",
        "x",
        _ratio({}, {"batch": 4, "sequence": 1024}),
        lambda value: abs(value / 1.84 - 1) <= 0.1,
    ),
    Conclusion(
        "a batch of 3 explains FSDP's 43 TFLOPS within 50 % (Figure 5)",
        "%",
        lambda world: 100 * (world.row("FSDP 56 layers", batch=3, sequence=1024).value / 43 - 1),
        lambda value: abs(value) <= 50,
    ),
    Conclusion(
        "a batch of 1 explains most of 12.2 times on an A100 (Figure 7)",
        "x",
        lambda world: (
            world.row("MegaTrain 14b on an A100").value
            / world.row("ZeRO-3 14b on an A100", batch=1, sequence=1024).value
        ),
        lambda value: value > 6.1,
    ),
    Conclusion(
        "ZeRO-3 does not hold 32B on a GH200",
        "GB",
        _spare("gh200", "zero3_offload", "qwen2.5-32b"),
        lambda value: value < 0,
    ),
    Conclusion(
        "ZeRO-3 does not hold 72B on an H200 with 1.5 TB",
        "GB",
        _spare("h200-paper", "zero3_offload", "qwen2.5-72b"),
        lambda value: value < 0,
    ),
    Conclusion(
        "ZeRO-3 does not hold 32B on an A100 (an input)",
        "GB",
        _spare("a100", "zero3_offload", "qwen2.5-32b"),
        lambda value: value < 0,
    ),
    Conclusion(
        "MegaTrain's code holds 120B on 1.5 TB (an input)",
        "GB",
        _spare("h200-paper", "megatrain_code", "gpt-oss-120b"),
        lambda value: value >= 0,
    ),
    Conclusion(
        "the paper's schedule, 12 bytes per parameter, holds 120B on 1.5 TB",
        "GB",
        _stated_120b,
        lambda value: value >= 0,
    ),
    Conclusion(
        "the code on an A6000 and an RTX 3090 is met within 30 % (Tables 8, 9)",
        "%",
        lambda world: max(
            (
                100 * (world.predicted(row).value / (row.value or 1) - 1)
                for row in load_rows()
                if row.source in ("paper Table 8", "paper Table 9")
                and (row.policy, row.quantity) == ("megatrain_code", "tflops")
            ),
            key=abs,
        ),
        lambda value: abs(value) <= 30,
    ),
    Conclusion(
        "ours is faster than ZeRO-3 at 14B, 32 x 1,024 on a GH200",
        "x",
        _ours_against("ZeRO-3 14b"),
        lambda value: value > 1,
        True,
    ),
    Conclusion(
        "ours is 1.5 times as fast as the code there",
        "x",
        _ours_against("MegaTrain 14b"),
        lambda value: value > 1.5,
        True,
    ),
)


def simulate() -> Any:
    """Returns the data of `Robustness` in paper_figures."""
    tried: list[dict[str, Any]] = []
    for perturbation in PERTURBATIONS:
        world = World(perturbation)
        values = [
            conclusion.value(world) if perturbation.rates or not conclusion.own else None
            for conclusion in CONCLUSIONS
        ]
        tried.append(
            {
                "name": perturbation.name,
                "values": values,
                "holds": [
                    None if value is None else conclusion.holds(value)
                    for conclusion, value in zip(CONCLUSIONS, values, strict=True)
                ],
            }
        )
    return {
        "conclusions": [
            {"name": conclusion.name, "unit": conclusion.unit} for conclusion in CONCLUSIONS
        ],
        "perturbations": tried,
    }
