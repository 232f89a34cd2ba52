"""Clipping: emits the ops that compute the factor of each layer's gradient or update.

* `global`: one coefficient from the sums of squares of all layers, computed at the end of the step.
* `layer`: one coefficient per layer, from the sum of squares of its own gradient. It is known as
  soon as the gradient is complete.
* `update`: one factor per tensor, from the sums of g^2 / v (gradient g, second moment v) of its own
  layer. It is also known as soon as the gradient is complete.
* `adagc`: one factor per tensor, from its own sum of squares and from its moving norm, which is
  kept from step to step. It is also known as soon as the gradient is complete.
* `none`: nothing is clipped. One op still checks that the losses are finite.

A step with a loss or norm that is not finite leaves the same bits with every policy. A loss that is
not finite stops all updates of the step, since all losses are known before the first update. A norm
that is not finite stops all updates with `global`, and otherwise only the update of its own layer.
The moving norms of a layer stay unchanged if its update is stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import BY_LAYER, BY_TENSOR
from megatrain.simulator.model.workload import Clipping as Kind
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.schedule import Buffer, OpId
from megatrain.simulator.schedule.arithmetic import RATIO_ROW, SCALAR_BYTES
from megatrain.simulator.schedule.plan import Plan

Chunk = tuple[int | None, int, int]
"""A part of a layer: (number, first parameter, number of parameters). The number is None if the
part is the whole layer."""


class _Persistent(NamedTuple):
    """The persistent buffers of clipping."""

    buffers: tuple[Buffer, ...]
    """What a builder has to keep."""
    norm: Mapping[str, str]
    """Layer -> the buffer with its sums of squares, with kinds that measure gradients."""
    moving: Mapping[str, str]
    """Layer -> the buffer with the moving norms of its tensors, with `adagc`."""
    own: Mapping[str, str]
    """Layer -> the buffer with its own factors, with the kinds in `BY_LAYER`."""
    all: str
    """The buffer that every update reads, with `global` and `none`. Empty with other kinds."""


@functools.lru_cache(maxsize=64)
def _persistent(
    builder_kind: type[Builder], model: ModelSpec, kind: Kind, place: str, on_host: frozenset[str]
) -> _Persistent:
    """Returns the persistent buffers of clipping by `kind`, in `place` except those of the factors
    of the layers in `on_host`.

    `builder_kind` is the kind of builder that they are for. Cached because all plans of a search
    need the same.
    """
    builder, stack = builder_kind(""), model.stack
    sizes = dict.fromkeys(stack, SCALAR_BYTES)
    if kind in BY_TENSOR:
        for layer, spec in stack.items():
            sizes[layer] = -(-4 * len(spec.tensors) // SCALAR_BYTES) * SCALAR_BYTES
    norm = {
        layer: builder.persistent(f"{place}.norm", layer, sizes[layer], "norms")
        for layer in (stack if kind in ("global", "layer", "adagc") else ())
    }
    moving = {
        layer: builder.persistent(f"{place}.moving_norms", layer, size, "moving_norms")
        for layer, size in (sizes.items() if kind == "adagc" else ())
    }
    own, shared = dict[str, str](), ""
    if kind not in BY_LAYER:
        shared = builder.persistent(f"{place}.clips", "all", SCALAR_BYTES, "clips")
    else:
        for layer, size in sizes.items():
            side = "host" if layer in on_host else place
            own[layer] = builder.persistent(f"{side}.clips", layer, size, "clips")
    return _Persistent(builder.build().buffers, norm, moving, own, shared)


class Clipping:
    """Emits the clipping ops of one step, and makes their buffers."""

    def __init__(
        self,
        builder: Builder,
        plan: Plan,
        place: str,
        lane: str,
        update_lane: str,
        on_host: frozenset[str] = frozenset(),
    ) -> None:
        """Makes the buffers.

        Args:
            builder: The builder of the step.
            plan: The plan, whose workload has the kind of clipping.
            place: `device` or `host`, where the buffers are.
            lane: The lane that runs `norm` ops.
            update_lane: The lane that runs the ops of clipping by `update`.
            on_host: Layers that the CPU updates. Their `update_ratios` ops run on the lane `cpu`,
                and the buffers of these ops are in host memory.
        """
        self.builder, self.stack, self.kind = builder, plan.model.stack, plan.workload.clipping
        self.lane, by_update = lane, self.kind == "update"
        self._usual_side = (place, update_lane)
        self._on_host = on_host if by_update else frozenset[str]()
        made = _persistent(
            type(builder),  # type: ignore[arg-type]  # mypy: a class is not Hashable
            plan.model,
            self.kind,
            place,
            self._on_host,
        )
        builder.keep(made.buffers)
        self.norm, self.moving, self.own, self.all = made.norm, made.moving, made.own, made.all
        sides = dict.fromkeys(map(self._side, self.stack)) if by_update else ()
        for side, _ in sides:
            most = max(
                spec.elements for layer, spec in self.stack.items() if self._side(layer)[0] == side
            )
            builder.slots(f"{side}.ratio_rows", 1, 4 * most // RATIO_ROW, "ratio_sums")
        self.losses: list[str] = []
        """The buffers of all losses. The policy sets them in `losses_written`."""

    def _side(self, layer: str) -> tuple[str, str]:
        """Returns the place of the layer's buffers of clipping by `update`, and the lane that runs
        its ops.
        """
        return ("host", "cpu") if layer in self._on_host else self._usual_side

    def factor(self, layer: str) -> str:
        """Returns the buffer with the factor that the layer's update reads."""
        return self.all or self.own[layer]

    def measure(self, layer: str, gradient: str, moments: str) -> None:
        """Emits the ops that can run once the layer's gradient is complete.

        `gradient` and `moments` are buffers with the data of the whole layer. Only clipping by
        `update` reads `moments`.
        """
        spec = self.stack[layer]
        if self.kind == "update":
            rows = self.rows(layer)
            self.ratios(layer, gradient, moments, rows)
            self.clip_by(layer, rows)
        elif self.kind != "none":
            self.builder.op(
                OpId("norm", layer),
                self.lane,
                [gradient],
                [self.norm[layer]],
                parameters=spec.elements,
            )
            if self.kind in BY_LAYER:
                moving = [self.moving[layer]] if self.moving else []
                self.builder.op(
                    OpId("clip", layer),
                    self.lane,
                    [self.norm[layer], *moving, *self.losses],
                    [self.own[layer], *moving],
                )

    def rows(self, layer: str) -> str:
        """Returns a slot for the layer's sums of g^2 / v. `clip_by` releases it."""
        return self.builder.acquire(f"{self._side(layer)[0]}.ratio_rows")

    def ratios(
        self, layer: str, gradient: str, moments: str, rows: str, chunk: Chunk | None = None
    ) -> None:
        """Emits the op that sums g^2 / v of the whole layer, or of one chunk of it, into `rows`."""
        number, first, count = chunk or (None, 0, self.stack[layer].elements)
        self.builder.op(
            OpId("update_ratios", layer, chunk=number),
            self._side(layer)[1],
            [gradient, moments],
            [rows],
            offset=first,
            parameters=count,
        )

    def clip_by(self, layer: str, rows: str) -> None:
        """Emits the op that computes the factors of the layer's tensors from the sums in `rows`,
        and releases `rows`.
        """
        self.builder.op(
            OpId("clip", layer),
            self._side(layer)[1],
            [rows, *self.losses],
            [self.own[layer]],
            parameters=self.stack[layer].elements,
        )
        self.builder.release(rows)

    def finish(self) -> None:
        """Emits the op that computes the coefficient that all layers share, with `global` and
        `none`. Call it after `measure` of every layer.
        """
        if self.all:
            self.builder.op(
                OpId("clip"), self.lane, [*self.norm.values(), *self.losses], [self.all]
            )
