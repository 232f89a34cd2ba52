"""Tests that each mistake in a policy from outside is one line with the op, what is allowed and a
fix. The policy is the example of docs/adding.md, with one mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pages import saved_examples

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Placement, Plan

LOWER = """
    def lower(self, plan):
        builder = Builder(plan.policy)
        compute(builder, plan, self.storage(builder, plan))
        return builder.build()
"""
"""What a policy inherits that defines `storage`."""
EXAMPLE = saved_examples("docs/adding.md")["pinned.py"] + LOWER
EXAMPLE = EXAMPLE.replace("import Builder\n", "import Builder, compute\n")
ACQUIRE = 'builder.acquire("device.kept")'
POOL = '"device.kept", len(layers), size, "weights", dtype'
RELEASE = "            self.builder.release(slot)\n"
LOAD = 'OpId("load_weights", layer, "f", 0, chunk)'
COPY = "offset=offset, bytes=count"
SUPER_UPDATE = "        super().update()\n"
UPDATE = """        self.decoders.clear()
        self.vocabulary.clear()
        self.clipping.finish()
        for layer, spec in self.stack.items():
            reads = [self.host["gradients", layer], self.clipping.factor(layer)]
            names = ("weights", "master_low", "moments")
            writes = [self.host[name, layer] for name in names if (name, layer) in self.host]
            op = OpId("cpu_update", layer)
"""
EMIT = "            self.builder.op(op, 'cpu', reads, writes, parameters=spec.elements)\n"
UPDATE += EMIT
"""What `super().update()` does."""


def updating(old: str, new: str) -> tuple[str, str]:
    """Returns a change of the example to an update with a mistake."""
    assert UPDATE.count(old) == 1
    return SUPER_UPDATE, UPDATE.replace(old, new)


def adding(method: str) -> tuple[str, str]:
    """Returns a change of the example that adds a method to its store."""
    return "\n\nclass Pinned(", f"\n{method}\n\nclass Pinned("


def editing(edit: str) -> tuple[str, str]:
    """Returns a change of the example that edits the ops of its schedule."""
    return "        return builder.build()\n", (
        "        import msgspec\n"
        "        schedule = builder.build()\n"
        "        ops = list(schedule.ops)\n"
        '        at = next(i for i, op in enumerate(ops) if op.id == "F2.m0")\n'
        f"        ops[at] = msgspec.structs.replace(ops[at], {edit})\n"
        "        return msgspec.structs.replace(schedule, ops=tuple(ops))\n"
    )


DEFERS = "    def defers_update(self, plan):\n        return True\n\n"
EXITS = "    def flush_update(self, plan):\n        raise SystemExit(7)\n\n"
LOSSES = "    def losses_written(self, losses):\n        pass\n"
LOST = """    def gradient_written(self, layer, phase, micro, buffer):
        if layer == "2":
            self.builder.release(buffer)
        else:
            super().gradient_written(layer, phase, micro, buffer)
"""
STALE = "    def weights(self, layer: str, phase: str, micro: int) -> str:\n"
MISTAKES: dict[str, tuple[tuple[str, str], str]] = {
    "no dependency": (editing("after=()"), "nothing orders load_weights .* before forward F2.m0;"),
    "late dependency": (editing('after=("B2.m0",)'), "F2.m0: depends on B2.m0, which is not"),
    "no release": (
        (RELEASE, "            pass\n"),
        "found never released: device.kept:0, device.kept:1;",
    ),
    "two releases": (
        (RELEASE, 2 * RELEASE),
        "backward B1.m1: releases device.kept:1, which is not acquired;",
    ),
    "release of a slot that is not": (
        (RELEASE, '            self.builder.release("device.keep:0")\n'),
        "found release of device.keep:0 .*, line 3",
    ),
    "no acquire": ((ACQUIRE, '"device.kept:0"'), "load_weights W0f.m0.c0: touches device.kept:0"),
    "unknown buffer": (
        ('self.host["weights", layer]', '"host.weight:0"'),
        "load_weights W0f.m0.c0: unknown buffer host.weight:0;",
    ),
    "unknown pool": ((ACQUIRE, 'builder.acquire("device.keep")'), "no pool device.keep of slots"),
    "no free slot": ((POOL, POOL.replace("len(layers)", "0")), "no slot of device.kept is free"),
    "two ops with one id": (
        ("enumerate(self._chunks(layer))", "[(0, (0, 4096)), (0, (4096, 4096))]"),
        "load_weights W0f.m0.c0: two ops have this id; allowed: ids that are unique",
    ),
    "unknown lane": (('"h2d"', '"copy"'), "W0f.m0.c0: unknown lane 'copy' .*allowed: compute,"),
    "wrong lane": (('"h2d"', '"d2h"'), "load_weights W0f.m0.c0: on lane d2h; allowed: lane h2d;"),
    "pool on the host": (
        ("device.kept", "host.kept"),
        "W0f.m0.c0: host.kept:0 on lane h2d; allowed: a buffer in device memory there;",
    ),
    "pool without a place": (("device.kept", "kept"), "found pool 'kept' .*allowed: device.NAME"),
    "unknown class of data": (
        (POOL, POOL.replace("weights", "weight")),
        "pool device.kept: unknown class of data 'weight' .*; allowed: weights, ",
    ),
    "no dtype": ((POOL, POOL.replace(", dtype", "")), "no dtype for weights .*fix: pass dtype"),
    "unknown kind of op": (
        ('"load_weights"', '"load_weight"'),
        "unknown kind 'load_weight' .*; allowed: load_weights, embed,",
    ),
    "unknown layer": ((LOAD, LOAD.replace("layer", '"9"')), "W9f.m0.c0: layer 9; allowed: .* 0, 1"),
    "layer that is a number": (
        (LOAD, LOAD.replace("layer", "int(layer)")),
        "W0f.m0.c0: layer 0 .*; allowed: a string",
    ),
    "slots that are too small": (
        (POOL, POOL.replace("size,", "size // 2,")),
        r"load_weights W0f.m0.c3: device.kept:0 has [\d,]+ bytes; allowed: [\d,]+ bytes or more, .*"
        r"; fix: pass a larger size to Builder\.slots",
    ),
    "a dtype that weights cannot have": (
        (POOL, POOL.replace("dtype", '"int8"')),
        r"device.kept:0: weights in int8; allowed: bf16 or fp32; fix: .* to Builder\.slots",
    ),
    "unknown size": ((COPY, "byte=count"), "W0f.m0.c0: unknown size 'byte'.*; allowed: offset, "),
    "no bytes": ((COPY, "offset=offset"), "load_weights W0f.m0.c0: copies 0 bytes"),
    "half of the bytes": (
        (COPY, "offset=offset, bytes=count // 2"),
        "forward F0.m0: device.kept:0 has only a part of the weights of layer 0;",
    ),
    "weights of another layer": (
        ('self.host["weights", layer]', 'self.host["weights", "1"]'),
        "forward F0.m0: reads the weights of layer 1 in device.kept:0; allowed: .* of layer 0;",
    ),
    "slot of another layer": (
        (STALE, STALE + '        layer = "1" if layer == "3" else layer\n'),
        "forward F3.m0: reads the weights of layer 1",
    ),
    "an op that nobody waits for": (
        (
            SUPER_UPDATE,
            '        slot, op = self.builder.acquire("device.kept"), OpId("load_weights", "0")\n'
            '        home = [self.host["weights", "0"]]\n'
            '        self.builder.op(op, "h2d", home, [slot], bytes=4096)\n'
            "        self.builder.release(slot)\n" + SUPER_UPDATE,
        ),
        "load_weights W0: no op reads what it writes to device.kept:0;",
    ),
    "a gradient that is lost": (adding(LOST), "backward B2.m0: no op reads what it writes"),
    "no losses": (adding(LOSSES), "clip C: does not read device.losses:0, device.losses:1;"),
    "no clip": (
        updating("        self.clipping.finish()\n", ""),
        "UCe: reads host.clips:all before",
    ),
    "no update of a layer": (
        updating("self.stack.items()", "list(self.stack.items())[1:]"),
        "not every parameter of layer e is updated once;",
    ),
    "two updates of a layer": (
        updating(EMIT, EMIT + EMIT.replace("(op,", '(OpId("cpu_update", layer, "b"),')),
        "cpu_update UCe, cpu_update UCeb: not every parameter of layer e is updated once;",
    ),
    "no parameters": (updating("parameters=spec.elements", ""), "UCe: updates 0 parameters;"),
    "no layer": (updating('OpId("cpu_update", layer)', 'OpId("cpu_update")'), "UC: no layer;"),
    "no schedule": (("        return builder.build()\n", ""), "it returned NoneType, not the"),
    "no ops": (
        ("        return builder.build()\n", "        return Builder(plan.policy).build()\n"),
        "found a schedule without ops; allowed: the ops of one optimizer step; fix: emit",
    ),
    "an exit": (
        ("        return builder.build()\n", "        raise SystemExit(7)\n"),
        r"found SystemExit in lower: 7 \(.*, line \d+\); allowed: a schedule, or a UserError",
    ),
    "an exit of flush_update": (
        ("    def storage(", EXITS + "    def storage("),
        "found SystemExit in flush_update: 7 ",
    ),
    "defers_update alone": (
        ("    def storage(", DEFERS + "    def storage("),
        "defers_update is True and flush_update returns no schedule;",
    ),
    "no name": (('    name = "pinned"\n', ""), "pinned.py: name: found no name;"),
    "unknown knob": (
        ('    name = "pinned"\n', '    name = "pinned"\n    knobs = ("weight_slot",)\n'),
        r"knobs: found \['weight_slot'\]; allowed: a tuple of weight_slots, ",
    ),
    "knobs that are a string": (
        ('    name = "pinned"\n', '    name = "pinned"\n    knobs = "weight_slots"\n'),
        "knobs: found 'weight_slots'; allowed: a tuple of weight_slots, ",
    ),
}


def planned(make_plan: Callable[..., Plan], path: Path, **changes: object) -> Plan:
    """Returns a plan under the policy in the file `path`, with its digest."""
    plan = make_plan(str(path), layers=6, accumulation=2, **changes)
    return msgspec.structs.replace(plan, digest=policies.lower(plan).digest)


@pytest.mark.parametrize("mistake", ["unknown size", "layer that is a number", "wrong lane"])
def test_a_search_reports_a_mistake_as_a_check_does(
    make_plan: Callable[..., Plan], tmp_path: Path, mistake: str
) -> None:
    """Without a `lower` of its own, the policy is timed with another builder. It also has no wrong
    lane when a cost model is asked, because this takes the rate of a copy from its lane.
    """
    (old, new), message = MISTAKES[mistake]
    path = tmp_path / "pinned.py"
    path.write_text(EXAMPLE.removesuffix(LOWER).replace(old, new), encoding="utf-8")
    plan = make_plan(str(path), layers=6, accumulation=2)
    for lowering in (policies.lower_for_timing, policies.lower):
        with pytest.raises(UserError, match=message):
            lowering(plan)


def search_and_verify(plan: Plan) -> None:
    """Does what a command does with a policy: lowers a plan for timing, then checks it."""
    policies.lower_for_timing(plan)
    policies.verified(msgspec.structs.replace(plan, digest=policies.lower(plan).digest))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(
    make_plan: Callable[..., Plan], tmp_path: Path, mistake: str
) -> None:
    (old, new), message = MISTAKES[mistake]
    assert old in EXAMPLE
    path = tmp_path / "pinned.py"
    path.write_text(EXAMPLE.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        search_and_verify(make_plan(str(path), layers=6, accumulation=2))
    assert str(caught.value).startswith(f"policy {path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("relative", [True, False])
def test_a_failure_names_its_line(
    make_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    """Also if it is in a module that the policy imports, or if the policy's path is relative."""
    monkeypatch.chdir(tmp_path)
    path = Path("pinned.py") if relative else tmp_path / "pinned.py"
    text = EXAMPLE.replace(RELEASE, "            self.builder.relaese(slot)\n")
    line = text[: text.index("relaese")].count("\n") + 1
    message = (
        r"AttributeError in lower: .* 'relaese'.* \({file}, line {line}\); allowed: a schedule"
    )
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message.format(file=r"pinned\.py", line=line)):
        policies.lower(make_plan(str(path), layers=6))
    store, policy = text.split("\n\nclass Pinned(")
    Path("store.py").write_text(store, encoding="utf-8")
    policy = f"from store import *\n\n\nclass Pinned({policy}"
    path.write_text(policy, encoding="utf-8")
    with pytest.raises(UserError, match=message.format(file=r"store\.py", line=line)):
        policies.lower(make_plan(str(path), layers=6))


def test_a_policy_that_makes_another_schedule_each_time_is_named(
    make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    path = tmp_path / "pinned.py"
    number = "        self.made = getattr(self, 'made', 0) + 1\n"
    path.write_text(
        EXAMPLE.replace(
            "        builder = Builder(plan.policy)\n",
            f"{number}        builder = Builder(f'{{plan.policy}}{{self.made}}')\n",
        ),
        encoding="utf-8",
    )
    plan = planned(make_plan, path)
    policies.verified(plan)
    policies._lowered.cache_clear()
    with pytest.raises(UserError, match=r"of the same plan; allowed: a `lower` that always"):
        policies.verified(plan)


DEFERRING = """
from megatrain.simulator.policies.building import Builder, update_operands
from megatrain.simulator.policies.streamed import Streamed, StreamedPolicy
from megatrain.simulator.schedule import OpId


class Deferring(Streamed):
    def __init__(self, builder, plan):
        super().__init__(builder, plan)
        self.late, self.done = list(self.stack)[:LATE], set()

    def update_one(self, layer):
        reads, writes = update_operands(self.host, layer, self.clipping.factor(layer))
        parameters = self.stack[layer].elements
        self.builder.op(OpId("cpu_update", layer), "cpu", reads, writes, parameters=parameters)

    def weights(self, layer, phase, micro):
        if layer in self.late and layer not in self.done:
            self.done.add(layer)
            self.update_one(layer)
        return super().weights(layer, phase, micro)

    def update(self):
        self.decoders.clear()
        self.vocabulary.clear()
        self.clipping.finish()
        for layer in self.stack:
            if layer not in self.late:
                self.update_one(layer)


class Policy(StreamedPolicy):
    name = "deferring"

    def storage(self, builder, plan):
        return Deferring(builder, plan)

    def defers_update(self, plan):
        return True

    def flush_update(self, plan):
        builder = Builder(plan.policy)
        store = self.storage(builder, plan)
        for layer in store.late[FLUSHED:]:
            store.update_one(layer)
        return builder.build()
"""
"""A policy that updates the first LATE layers in the next step's forward pass, on the host."""


@pytest.mark.parametrize(
    ("late", "flushed", "message"),
    [
        (8, 0, ""),
        (
            4,
            0,
            "UC3: updates layer 3 with a .* of this step; .*fix: defer the update of every layer",
        ),
        (8, 1, "flush_update does not update layer e as the step does;"),
    ],
)
def test_an_update_is_deferred_as_a_whole(
    make_plan: Callable[..., Plan], tmp_path: Path, late: int, flushed: int, message: str
) -> None:
    """The executor applies all updates of a step with the learning rate and the number of the same
    step. A policy that defers some of them would train with wrong ones, without an error.
    """
    path = tmp_path / "deferring.py"
    code = DEFERRING.replace("LATE", str(late)).replace("FLUSHED", str(flushed))
    path.write_text(code, encoding="utf-8")
    plan = planned(make_plan, path)
    if not message:
        policies.verified(plan)
        return
    with pytest.raises(UserError, match=message):
        policies.verified(plan)
    path = tmp_path / "undeclared.py"
    path.write_text(code.partition("    def defers_update")[0], encoding="utf-8")
    with pytest.raises(UserError, match=r"UCe: host\.gradients:e has 0 of the 2 gradients"):
        policies.verified(planned(make_plan, path))


@pytest.mark.parametrize("policy", policies.names())
@pytest.mark.parametrize(
    "changes",
    [
        {"placement": Placement(weights="0-2", moments="all", gradients="1,h")},
        {"clipping": "adagc", "tied": True, "accumulation": 2},
        {"clipping": "update", "placement": Placement(host_updated="e,1-2")},
        {"clipping": "layer", "weights_ahead": 1, "weight_slots": 9},
        {"gradients": "8bit"},
        {"optimizer": "muon"},
        {"accumulation": 4, "micro_batch_group": 2, "sum_group": 2},
        {"chunk_bytes": 4097},  # chunks of streamed policies end within a parameter
        {"chunk_bytes": 4098, "dtype": "fp32"},
    ],
    ids=str,
)
def test_the_step_of_every_policy_is_right(
    make_plan: Callable[..., Plan], policy: str, changes: dict[str, object]
) -> None:
    try:
        plan = make_plan(policy, **changes)
        plan = msgspec.structs.replace(plan, digest=policies.lower(plan).digest)
    except UserError as refused:
        pytest.skip(str(refused))
    policies.verified(plan)
