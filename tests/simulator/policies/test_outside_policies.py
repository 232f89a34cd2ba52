"""Tests of policies from files and entry points: how they are found, searched and refused."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from forget import forget

from megatrain.experiments.sweep.simulated import Simulator
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.batch_splits import best_split
from megatrain.simulator.planner.search import candidates, search
from megatrain.simulator.planner.shared_step import shared_step
from megatrain.simulator.policies.k_buffer import KBuffer
from megatrain.simulator.policies.policy import Policy, PolicyWarning
from megatrain.simulator.policies.registry import POLICIES
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan
from megatrain.simulator.verdict.verdict import judge

REFUSES = """
    from megatrain.simulator.policies.overlapped import Overlapped

    class Refusing({1}):
        name = "refusing"
        placements = ("weights",) if {1} is Overlapped else KBuffer.placements

        def lower(self, plan):
            if {0}:
                raise UserError("policy refusing", found="it", allowed="others", fix="none")
            return super().lower(plan)

        def buffers(self, plan, *, merged=False):
            return self.lower(plan)
"""
H200 = HardwareSpec.load("h200")
WORK = Workload(batch=2, sequence=16)
HEADER = """
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.policies.k_buffer import KBuffer
from megatrain.simulator.policies.policy import Policy
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def saved(code: str) -> str:
        path = tmp_path / f"policy_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(HEADER + textwrap.dedent(code), encoding="utf-8")
        return str(path)

    return saved


class Installed(KBuffer):
    name = "installed"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs two policies by entry points, one with the name of a built-in policy."""
    value = f"{__name__}:Installed"
    points = [
        importlib.metadata.EntryPoint(name, value, POLICIES.group)
        for name in ("installed", "k_buffer")
    ]
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda _: Installed)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: points)
    forget(POLICIES)


@pytest.fixture(autouse=True)
def _no_entry_points_afterwards() -> object:
    yield
    forget(POLICIES)


def test_a_policy_in_a_file_is_searched_like_ours(
    make_plan: Callable[..., Plan], write: Callable[[str], str]
) -> None:
    path = write("class Mine(KBuffer):\n    name = 'mine'\n")
    model = make_plan().model
    mine, ours = search(model, H200, WORK, policies=[path, "k_buffer"])
    assert {mine.plan.policy, ours.plan.policy} == {path, "k_buffer"}
    assert mine.step_seconds == ours.step_seconds
    assert mine.plan.knobs == ours.plan.knobs
    policies.executable(mine.plan if mine.plan.policy == path else ours.plan)


RACING = """
    import msgspec

    class Racing(KBuffer):
        name = "racing"

        def lower(self, plan):
            schedule = super().lower(plan)
            ops = [
                msgspec.structs.replace(op, after=()) if op.kind == "forward" else op
                for op in schedule.ops
            ]
            return msgspec.structs.replace(schedule, ops=tuple(ops))
"""


@pytest.mark.parametrize("planned", [True, False])
def test_an_incorrect_policy_from_a_file_gets_no_prediction(
    make_plan: Callable[..., Plan], write: Callable[[str], str], planned: bool
) -> None:
    """A schedule without a wait is faster, so a search or a sweep would recommend it."""
    path = write(RACING)
    plan = make_plan(path)
    message = r"policy .*: found race on device\.weights:0: nothing orders load_weights "
    with pytest.raises(UserError, match=message):
        search(plan.model, H200, WORK, policies=[path])
    with pytest.warns(PolicyWarning, match=message):
        (choice,) = search(plan.model, H200, WORK, policies=[path, "k_buffer"])
    assert choice.plan.policy == "k_buffer"
    simulator = Simulator(H200)
    row = (simulator.planned_row if planned else simulator.row)(plan, "key")
    assert (row.decided_by, row.step_seconds) == ("refused", None)
    assert re.search(message, row.reason)


def test_a_plan_finds_its_policy_from_any_folder(
    tmp_path: Path,
    make_plan: Callable[..., Plan],
    write: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan and the file move together. A path from before files were relative is kept."""
    name = Path(write("class Mine(KBuffer):\n    name = 'mine'\n")).name
    plans, elsewhere = tmp_path / "plans", tmp_path / "elsewhere"
    plans.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    plan = make_plan(policy=name)
    plan = msgspec.structs.replace(plan, digest=policies.lower(plan).digest)
    plan.save(plans / "plan.toml")
    assert f'policy = "../{name}"' in (plans / "plan.toml").read_text()
    assert Plan.load("plans/plan.toml") == plan
    moved = tmp_path / "moved"
    (moved / "plans").mkdir(parents=True)
    for file in ("plans/plan.toml", name):
        Path(file).rename(moved / file)
    monkeypatch.chdir(elsewhere)
    forget(POLICIES)
    loaded = Plan.load("../moved/plans/plan.toml")
    assert loaded.policy == f"../moved/{name}"
    assert policies.verified(loaded).ops
    (moved / name).rename(elsewhere / f"../{name}")
    assert Plan.load("../moved/plans/plan.toml").policy == f"../{name}"


@pytest.mark.usefixtures("installed")
def test_an_installed_policy_is_among_the_contenders(make_plan: Callable[..., Plan]) -> None:
    assert "installed" in policies.contenders()
    assert type(policies.find("installed")) is Installed
    assert type(policies.find("k_buffer")) is KBuffer, "a plugin replaced a built-in policy"
    policies.lower(make_plan("installed")).check()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('at import')", "RuntimeError while it was loaded: at import"),
        ("raise SystemExit(7)", "SystemExit while it was loaded: 7"),
        ("nothing = 1", "found 0 subclasses of Policy; allowed: one"),
        ("class A(Policy): pass\nclass B(Policy): pass", "found 2 subclasses of Policy"),
    ],
)
def test_a_file_that_defines_no_policy_gives_a_one_line_error(
    make_plan: Callable[..., Plan], write: Callable[[str], str], code: str, message: str
) -> None:
    path = write(code)
    with pytest.raises(UserError) as caught:
        policies.lower(make_plan(path))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"policy {path}: ")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"no file missing\.py; .* that defines a policy;"):
        policies.find("missing.py")


def test_a_policy_that_fails_does_not_stop_a_search_of_others(
    make_plan: Callable[..., Plan], write: Callable[[str], str]
) -> None:
    """A policy that raises an error is left out of a search with other policies, with a warning."""
    broken = write(
        """
        class Broken(KBuffer):
            name = "broken"

            def lower(self, plan):
                return {}["weights"]
        """
    )
    model = make_plan().model
    with pytest.warns(
        PolicyWarning, match=r"left out: policy .*: found KeyError in lower: 'weights'"
    ):
        (choice,) = search(model, H200, WORK, policies=[broken, "k_buffer"])
    assert choice.plan.policy == "k_buffer"
    with pytest.raises(UserError, match=r"found KeyError in lower: 'weights' .*, line 10\);"):
        search(model, H200, WORK, policies=[broken])


def test_the_search_skips_knobs_that_a_policy_refuses(
    make_plan: Callable[..., Plan], write: Callable[[str], str]
) -> None:
    """The search skips values of knobs that a policy refuses.

    Here a policy accepts only one checkpoint interval.
    """
    path = write(
        """
        class Picky(KBuffer):
            name = "picky"

            def lower(self, plan):
                self.refuse(plan)
                return super().lower(plan)

            def buffers(self, plan, *, merged=False):
                self.refuse(plan)
                return super().buffers(plan, merged=merged)

            def refuse(self, plan):
                if plan.knobs.checkpoint_interval != 1 or plan.knobs.weight_slots > 2:
                    raise UserError("policy picky", found="knobs", allowed="others", fix="none")
        """
    )
    model = make_plan(layers=8).model
    verdict = judge(model, H200, WORK, policies=[path], advise=False)
    assert verdict.feasible
    assert verdict.knobs["checkpoint_interval"] == 1
    assert verdict.knobs["weight_slots"] in (1, 2)


@pytest.mark.parametrize(
    ("refused", "given"),
    [
        ("plan.workload.accumulation > 1", {}),
        ("plan.workload.clipping != 'global'", {}),
        ("plan.workload.compiled", {}),
        ("plan.workload.loss_chunk < 1024", {"device_limit": 2**27}),
        ("plan.workload.clipping != 'global'", {"host_limit": 2**24}),
    ],
)
def test_advice_leaves_out_what_a_policy_refuses(
    write: Callable[[str], str], refused: str, given: dict[str, int]
) -> None:
    """Regression test: such a policy had no verdict, although its plan was there."""
    path = write(REFUSES.format(refused, "KBuffer"))
    model = ModelSpec.load("qwen2.5-0.5b").with_layers(2)
    work = Workload(batch=4, sequence=512, loss_chunk=1024)
    ours = judge(model, H200, work, policies=["k_buffer"], **given)
    verdict = judge(model, H200, work, policies=[path], **given)
    assert verdict.feasible == ours.feasible == (not given)
    assert {entry.change for entry in verdict.advice} <= {entry.change for entry in ours.advice}


@pytest.mark.parametrize("base", ["KBuffer", "Overlapped"])
def test_splits_of_a_step_that_a_policy_refuses_are_left_out(
    write: Callable[[str], str], base: str
) -> None:
    """If it refuses all of them, its error is raised.

    Regression test: the error was also raised if it placed weights and accepted other splits.
    """
    model = ModelSpec.load("qwen2.5-0.5b").with_layers(2)
    for refused, accumulation in (
        ("plan.workload.accumulation > 1", 1),
        ("plan.workload.accumulation != 2", 2),
    ):
        path = write(REFUSES.format(refused, base))
        choices = best_split(model, H200, Workload(batch=1, sequence=64), 512, policies=[path])
        assert choices[0].plan.workload.accumulation == accumulation
    # Nothing fits, and the smallest batch, which is usually reported then, is refused.
    path = write(REFUSES.format("plan.workload.accumulation > 1", base))
    (lacking,) = best_split(
        model, H200, Workload(batch=1, sequence=64), 512, policies=[path], device_limit=2**20
    )
    assert not lacking.feasible
    assert lacking.plan.workload.accumulation == 1
    never = write(REFUSES.format("True", base))
    with pytest.raises(UserError, match="refusing"):
        best_split(model, H200, Workload(batch=1, sequence=64), 512, policies=[never])


def test_no_plan_has_a_field_that_its_policy_does_not_declare(write: Callable[[str], str]) -> None:
    """Regression test: inputs were offloaded where a plan fits only in this way."""
    path = write(
        """
        class Part(KBuffer):
            name = "part"
            placements = ("saved_activations",)
        """
    )
    model = ModelSpec.load("qwen2.5-0.5b")
    verdict = judge(model, H200, Workload(batch=1, sequence=1024), policies=[path], advise=False)
    assert verdict.longest_context
    for tokens, fits in ((verdict.longest_context, True), (verdict.longest_context + 64, False)):
        work = Workload(batch=1, sequence=tokens, loss_chunk=1024)
        choice = candidates(model, H200, work, policies=[path])[0]
        assert choice.feasible == fits
        assert not choice.plan.knobs.placement.offloaded_inputs


def test_a_policy_that_places_a_part_is_advised_what_it_can_do(write: Callable[[str], str]) -> None:
    """Regression test: the gains of advice and of one more GiB were those of plans with fields of
    the placement that the policy does not obey.
    """
    path = write(
        """
        from megatrain.simulator.policies.overlapped import Overlapped

        class Part(Overlapped):
            name = "part"
            placements = ("weights",)
            knobs = ("weight_slots", "chunk_bytes")
        """
    )
    model = ModelSpec.load("qwen2.5-0.5b").with_layers(6)
    work = Workload(batch=4, sequence=512)
    limits = {"device_limit": 2**32, "host_limit": 2**35}
    verdict = judge(model, H200, work, policies=[path], **limits)
    (entry,) = [entry for entry in verdict.advice if entry.options == {"clipping": "none"}]
    changed = msgspec.structs.replace(work, clipping="none")
    found = judge(model, H200, changed, policies=[path], advise=False, **limits)
    assert entry.tokens_per_second == pytest.approx(found.tokens_per_second, rel=1e-6)
    for effect in verdict.one_more_gib:
        more = {**limits, f"{effect.place}_limit": limits[f"{effect.place}_limit"] + 2**30}
        found = judge(model, H200, work, policies=[path], advise=False, **more)
        assert effect.tokens_per_second <= found.tokens_per_second * (1 + 1e-6)
        fields = Placement.__struct_fields__
        knobs = effect.knobs or Knobs()
        assert {name for name in fields if getattr(knobs.placement, name)} <= {"weights"}


NEEDS_LAYERS = """
    class NeedsLayers(KBuffer):
        name = "needs layers"

        def lower(self, plan):
            plan.model.stack["%d"]
            if plan.knobs.weight_slots < 3:
                raise UserError("needs layers", found="2 slots", allowed="3", fix="none")
            return super().lower(plan)

        def buffers(self, plan, *, merged=False):
            return self.lower(plan)
"""


def test_only_an_error_of_the_user_s_own_model_is_reported(
    make_plan: Callable[..., Plan], write: Callable[[str], str]
) -> None:
    """The search shortens models. Here the default knobs are refused as well."""
    model = make_plan(layers=14).model
    (found,) = search(model, H200, WORK, policies=[write(NEEDS_LAYERS % 11)])
    assert found.plan.knobs.weight_slots >= 3
    with pytest.raises(UserError, match=r"found KeyError in lower: '14'"):
        search(model, H200, WORK, policies=[write(NEEDS_LAYERS % 14)])


def test_knobs_that_a_policy_does_not_read_are_neither_searched_nor_reported(
    make_plan: Callable[..., Plan],
) -> None:
    model = make_plan().model
    for name in policies.names():
        choice = search(model, H200, WORK, policies=[name])[0]
        read = policies.find(name).knobs
        defaults = Knobs()
        for field in Knobs.__struct_fields__:
            if field not in (*read, "placement"):
                assert getattr(choice.plan.knobs, field) == getattr(defaults, field)
        verdict = judge(model, H200, WORK, policies=[name], advise=False)
        # eager layers rebuild nothing, and one GPU exchanges nothing
        without_effect = {"rebuild_outputs", "exchange_bytes"}
        assert set(verdict.knobs) == {*read, "placement"} - without_effect


@pytest.mark.parametrize("policy", policies.names())
def test_the_knobs_that_a_policy_names_are_those_that_lowering_reads(
    make_plan: Callable[..., Plan], policy: str
) -> None:
    """A knob that a policy names changes the schedule or is refused.

    Any other knob changes nothing.
    """
    usual = make_plan(policy, layers=6, accumulation=2)

    def varied(**knobs: object) -> Schedule | None:
        try:
            return policies.lower(make_plan(policy, layers=6, accumulation=2, **knobs))
        except UserError:
            return None

    others = {
        "weight_slots": 3,
        "gradient_slots": 1,
        "gradient_staging": 1,
        "state_slots": 3,
        "checkpoint_interval": 2,
        "chunk_bytes": 8192,
    }
    for knob, value in others.items():
        found = varied(**{knob: value})
        changed = found is None or found.digest != policies.lower(usual).digest
        assert changed == (knob in policies.find(policy).knobs), knob


def test_the_interface_has_defaults(make_plan: Callable[..., Plan]) -> None:
    class Least(Policy):
        name = "least"

        def lower(self, plan: Plan) -> Schedule:
            return KBuffer().lower(plan)

    plan = make_plan("k_buffer")
    policy = Least()
    assert policy.buffers(plan) == KBuffer().lower(plan)
    assert not policy.defers_update(plan)
    assert policy.flush_update(plan) is None
    assert not policy.places_state
    assert policies.find("overlapped").places_state


def test_only_policies_without_copies_run_on_unified_memory(write: Callable[[str], str]) -> None:
    resident = """
        from megatrain.simulator.policies.resident import Resident

        class Other(Resident):
            streams = %s
        """
    unified, model = HardwareSpec.load("apple-m4-max"), ModelSpec.load("qwen2.5-0.5b")
    path = write(resident % False)
    (found,) = search(model, unified, WORK, policies=[path])
    assert found.feasible
    assert found.plan.policy == path
    with pytest.raises(UserError, match=r"there is nothing to copy; allowed: resident;"):
        search(model, unified, WORK, policies=[write(resident % True)])


@pytest.fixture
def muon_plan(make_plan: Callable[..., Plan], write: Callable[[str], str]) -> Callable[..., Plan]:
    """Returns a function that makes a plan with Muon and a policy that has the given code."""

    def made(code: str, **changes: object) -> Plan:
        return make_plan(write(code), optimizer="muon", hidden=256, head_dim=64, **changes)

    return made


def test_a_policy_that_updates_on_the_cpu_without_saying_so_is_refused_with_muon(
    muon_plan: Callable[..., Plan],
) -> None:
    """`updates_on_host` is False by default, so the optimizer is not refused before."""
    plan = muon_plan("class Mine(KBuffer):\n    name = 'mine'\n    updates_on_host = False\n")
    message = (
        r"policy .*: found cpu_update UC0: layer 0 updated on the CPU with optimizer muon;"
        r" allowed: updates of its matrices on the GPU, .*; fix: use policy overlapped"
    )
    with pytest.raises(UserError, match=message):
        search(plan.model, H200, plan.workload, policies=[plan.policy])
    adamw = search(plan.model, H200, WORK, policies=[plan.policy])
    assert adamw[0].plan.policy == plan.policy


EDITING = """
    import msgspec

    from megatrain.simulator.policies.resident import Resident

    class Edited(Resident):
        name = "edited"

        def lower(self, plan):
            schedule, ops = super().lower(plan), []
            for op in schedule.ops:
                ops += self.edited(op) if op.kind == "update" and op.layer == "1" else [op]
            return msgspec.structs.replace(schedule, ops=tuple(ops))

        def edited(self, op):
            replace = msgspec.structs.replace
            %s
"""
HALVES = """half = op.parameters // 2
            after, first = (*op.after, op.id + ".c1"), op.id + ".c1"
            return [
                replace(op, id=first, parameters=half),
                replace(op, offset=op.offset + half, parameters=op.parameters - half, after=after),
            ]"""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "return [replace(op, writes=op.writes[:-1])]",
            r"found update U1.*: 0 bytes of workspace for the matrices of layer 1; allowed: \d",
        ),
        (HALVES, r"found \d of 7 matrices of layer 1 are updated whole; allowed: all of them"),
    ],
)
def test_an_update_of_matrices_that_the_runtime_cannot_execute_is_refused(
    muon_plan: Callable[..., Plan], code: str, message: str
) -> None:
    plan = muon_plan(EDITING % code)
    assert policies.lower(muon_plan(EDITING % "return [op]")).ops
    policies.check_outside(muon_plan(EDITING % "return [op]"))
    with pytest.raises(UserError, match=message) as caught:
        policies.check_outside(plan)
    assert "\n" not in str(caught.value)


SHARDS = """
    import msgspec

    from megatrain.simulator.policies.overlapped import Overlapped

    class Mine(%s):
        name = "mine"
        shards = True

        def lower(self, plan):
            return super().lower(self.changed(plan))

        def lower_for_timing(self, plan):
            return super().lower_for_timing(self.changed(plan))

        def buffers(self, plan, *, merged=False):
            return super().buffers(self.changed(plan), merged=merged)

        def flush_update(self, plan):
            return super().flush_update(self.changed(plan))

        def changed(self, plan):
            return %s
"""
ALONE = "msgspec.structs.replace(plan, gpus=1)"


@pytest.mark.parametrize("base", ["KBuffer", "Overlapped"])
def test_a_policy_that_says_that_it_shards_and_does_not_is_refused_when_it_is_planned(
    make_plan: Callable[..., Plan], write: Callable[[str], str], base: str
) -> None:
    """`check` and `plan` search with `shared_step`, and `simulate` calls `verified`."""
    plan = make_plan(write(SHARDS % (base, ALONE)), accumulation=1)
    message = (
        r"policy .*: found no gather_weights of layer e in a step of 2 GPUs; allowed:"
        r" gather_weights and exchange_gradients of each layer, and exchange_sums; fix: emit these"
    )
    with pytest.raises(UserError, match=message):
        shared_step(plan, H200, 2)
    judged = functools.partial(judge, plan.model, H200, WORK, policies=[plan.policy], advise=False)
    assert judged().feasible
    with pytest.raises(UserError, match=message):
        judged(gpus=2)
    two = make_plan(plan.policy, gpus=2, accumulation=2)
    with pytest.raises(UserError, match=message):
        policies.verified(msgspec.structs.replace(two, digest=policies.lower(two).digest))


def test_a_policy_that_shards_is_the_one_that_is_predicted_for_several_gpus(
    make_plan: Callable[..., Plan], write: Callable[[str], str]
) -> None:
    """With one weight slot, a step takes longer than that of the built-in policy."""
    placement = "type(plan.knobs.placement)()"
    knobs = f"msgspec.structs.replace(plan.knobs, weight_slots=1, placement={placement})"
    slow = f"msgspec.structs.replace(plan, knobs={knobs})"
    steps = []
    for policy in (write(SHARDS % ("Overlapped", slow)), "overlapped"):
        verdict = judge(make_plan().model, H200, WORK, policies=[policy], advise=False, gpus=2)
        assert verdict.multi_gpu is not None
        steps.append(verdict.multi_gpu.step_seconds)
    assert steps[0] > steps[1]


def test_a_named_policy_that_does_not_share_a_step_is_refused_for_several_gpus(
    make_plan: Callable[..., Plan],
) -> None:
    """Regression test: the speed of the built-in policy was shown in its place."""
    model = make_plan().model
    named = judge(model, H200, WORK, policies=["k_buffer"], advise=False, gpus=2).multi_gpu
    assert named
    assert "policy k_buffer: gpus: found 2" in named.refused
    usual = judge(model, H200, WORK, advise=False, gpus=2).multi_gpu
    assert usual
    assert not usual.refused


def test_an_update_of_whole_layers_on_each_gpu_is_refused(
    make_plan: Callable[..., Plan], write: Callable[[str], str]
) -> None:
    """The schedule is that of another number of GPUs, so the parts have another size."""
    four = "msgspec.structs.replace(plan, gpus=4) if plan.gpus > 1 else plan"
    plan = make_plan(write(SHARDS % ("Overlapped", four)), gpus=2, accumulation=4)
    message = r"found 4096 parameters of layer 0 are updated by each of 2 GPUs; allowed: 8192, "
    with pytest.raises(UserError, match=message):
        policies.check_outside(plan)


@pytest.mark.parametrize("merged", ["True", "merged", "not merged"])
def test_an_outline_that_leaves_buffers_out_is_refused(
    make_plan: Callable[..., Plan], write: Callable[[str], str], merged: str
) -> None:
    """The search would find that the plan fits, or advise a batch that nothing can hold."""
    path = write(
        f"""
        import msgspec

        class Mine(KBuffer):
            name = "mine"

            def buffers(self, plan, *, merged=False):
                schedule = super().lower(plan)
                kept = [each for each in schedule.buffers if each.place != "host"]
                if {merged}:
                    schedule = msgspec.structs.replace(schedule, buffers=tuple(kept))
                return schedule
        """
    )
    mode = " with merged=True" if merged == "merged" else ""
    message = (
        rf"policy {re.escape(path)}: buffers: found 0 bytes of host\.[a-z_]+{mode}; allowed: \d+,"
        r" as in the schedule of `lower`; fix: return the same buffers as `lower`"
    )
    model = make_plan().model
    for limit in (None, 2**16):
        with pytest.raises(UserError, match=message):
            judge(model, H200, WORK, policies=[path], host_limit=limit)
