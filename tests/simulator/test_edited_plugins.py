"""Tests of files of policies, optimizers and cost models that are edited while a process uses them:
the next operation uses the new content, and nothing that was computed with the old one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forget import forget

from megatrain.experiments.cli import main as cli
from megatrain.simulator import policies
from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model import optimizer
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner import slot_search
from megatrain.simulator.planner.search import candidates, search
from megatrain.simulator.policies.registry import POLICIES
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Plan

H200 = HardwareSpec.load("h200")
WORK = Workload(batch=2, sequence=16)
POLICY = """
import msgspec
from megatrain.simulator.policies.k_buffer import KBuffer


class Mine(KBuffer):
    name = "mine"

    def lower(self, plan):
        knobs = msgspec.structs.replace(plan.knobs, weight_slots=SLOTS)
        return super().lower(msgspec.structs.replace(plan, knobs=knobs))

    def buffers(self, plan, *, merged=False):
        return self.lower(plan)
"""
OPTIMIZER = """
from megatrain.simulator.model.optimizer import Optimizer


class Mine(Optimizer):
    name = "mine"
    moments = MOMENTS

    def update(self, weights, moments, gradient, *, rate, number):
        weights.sub_(gradient.mul_(rate))
"""
COSTS = """
from megatrain.simulator.costs import Datasheet


class Slow(Datasheet):
    def duration_ns(self, op):
        return FACTOR * super().duration_ns(op)


def cost_model(hardware, model, workload):
    return Slow(hardware, model, workload)
"""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    forget(POLICIES, optimizer.OPTIMIZERS)
    yield
    forget(POLICIES, optimizer.OPTIMIZERS)


@pytest.fixture
def policy(tmp_path: Path) -> Callable[[int], str]:
    """Returns a function that writes a policy with a number of weight slots to one file."""

    def written(slots: int) -> str:
        (tmp_path / "mine.py").write_text(POLICY.replace("SLOTS", str(slots)), encoding="utf-8")
        return str(tmp_path / "mine.py")

    return written


def slots(plan: Plan) -> int:
    pools = [buffer.pool for buffer in policies.lower(plan).buffers]
    return pools.count("device.weights")


def test_an_edited_policy_is_used_by_the_next_operation(
    make_plan: Callable[..., Plan], policy: Callable[[int], str]
) -> None:
    """Both contents have the same size and are written in the same second."""
    plan = make_plan(policy(2), layers=6)
    assert slots(plan) == 2
    first = search(plan.model, H200, WORK, policies=[plan.policy])[0]
    former = policies.find(plan.policy)
    policy(3)
    assert slots(plan) == 3
    assert sum(buffer.pool == "device.weights" for buffer in policies.outline(plan).buffers) == 3
    again = search(plan.model, H200, WORK, policies=[plan.policy])[0]
    assert again.plan.digest != first.plan.digest
    assert policies.verified(again.plan)
    with pytest.raises(UserError, match="plan: digest"):
        policies.verified(first.plan)
    assert type(policies.find(plan.policy)) is not type(former)


def test_a_file_that_is_broken_removed_or_repaired_is_noticed(
    make_plan: Callable[..., Plan], policy: Callable[[int], str]
) -> None:
    plan = make_plan(policy(2), layers=6)
    policies.lower(plan)
    Path(plan.policy).write_text("raise RuntimeError('half of an edit')", encoding="utf-8")
    with pytest.raises(UserError, match="while it was loaded: half of an edit"):
        policies.lower(plan)
    Path(plan.policy).unlink()
    with pytest.raises(UserError, match="found no file"):
        policies.lower(plan)
    policy(3)
    assert slots(plan) == 3


def test_an_edit_has_no_effect_on_an_operation_that_has_begun(
    make_plan: Callable[..., Plan], policy: Callable[[int], str]
) -> None:
    plan = make_plan(policy(2), layers=6)
    with plugins.unchanging():
        assert slots(plan) == 2
        policy(3)
        with plugins.unchanging():
            policies.find("k_buffer")
        policies._lowered.cache_clear()  # type: ignore[attr-defined]
        assert slots(plan) == 2
    assert slots(plan) == 3


@pytest.mark.parametrize("searching", [search, candidates])
def test_a_search_uses_one_content_of_a_file(
    make_plan: Callable[..., Plan],
    policy: Callable[[int], str],
    monkeypatch: pytest.MonkeyPatch,
    searching: Callable[..., Any],
) -> None:
    """An edit during the search would mix times of two policies."""
    plan = make_plan(policy(2), layers=6)
    searching(plan.model, H200, WORK, policies=[plan.policy])
    found: list[int] = []
    timed = slot_search.uncontended_makespan_ns

    def edited(schedule: Schedule, costs: CostModel) -> int:
        policy(3)
        found.append(plugins.changes())
        return timed(schedule, costs)

    monkeypatch.setattr(slot_search, "uncontended_makespan_ns", edited)
    before = plugins.changes()
    searching(plan.model, H200, WORK, policies=[plan.policy])
    assert set(found) == {before}
    assert plugins.changes() == before + 1


def test_a_command_uses_one_content_of_a_file(tmp_path: Path) -> None:
    """The file is edited each time that a plan is lowered."""
    path, log = tmp_path / "mine.py", tmp_path / "log"
    append = "    open({!r}, 'a').write('#\\n')\n"
    text = POLICY.replace("SLOTS", "2").replace(
        "    def lower(self, plan):\n",
        "    def lower(self, plan):\n    " + append.format(str(path)),
    )
    path.write_text(text + "\n\nif True:\n" + append.format(str(log)), encoding="utf-8")
    words = ["check", "qwen2.5-0.5b", "--hardware", "h200", "--batch", "2", "--seq", "16"]
    assert cli.main([*words, "--policy", str(path)]) == 0
    assert path.read_text() != text
    assert log.read_text() == "#\n"


def test_an_edited_optimizer_is_not_mixed_with_what_its_former_moments_needed(
    make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"

    def known(moments: int) -> list[object]:
        path.write_text(OPTIMIZER.replace("MOMENTS", str(moments)), encoding="utf-8")
        found: list[object] = []
        for name in ("overlapped", "k_buffer"):
            plan = make_plan(name, optimizer=str(path))
            costs = cost_model(H200, plan.model, plan.workload)
            update = next(op for op in policies.lower(plan).ops if "update" in op.kind)
            merged = policies.outline(plan, merged=True).buffers
            found += [
                policies.lower(plan).digest,
                sum(buffer.bytes for buffer in merged),
                costs.duration_ns(msgspec.structs.replace(update, parameters=10**6)),
            ]
        return found

    first = known(1)
    edited = known(2)
    assert all(was != now for was, now in zip(first, edited, strict=True))
    forget(POLICIES, optimizer.OPTIMIZERS)
    assert known(2) == edited
    assert known(1) == first


def test_an_edited_cost_model_predicts_the_next_step(
    make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    path, plan = tmp_path / "slow.py", make_plan()
    hardware = msgspec.structs.replace(H200, cost_model=str(path))
    op = next(op for op in policies.lower(plan).ops if op.kind == "forward")
    times = []
    for factor in (1, 2):
        path.write_text(COSTS.replace("FACTOR", str(factor)), encoding="utf-8")
        times.append(cost_model(hardware, plan.model, plan.workload).duration_ns(op))
    assert times[1] == 2 * times[0]


def test_a_file_that_cannot_be_read_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    for name, found in (("folder.py", "a file that cannot be read:"), ("gone.py", "no file")):
        with pytest.raises(UserError, match=f"policy: found {found} .*{name}"):
            plugins.load_file("policy", str(tmp_path / name))


def test_two_files_of_one_name_do_not_replace_each_other(tmp_path: Path) -> None:
    found = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "mine.py"
        path.write_text(OPTIMIZER.replace("MOMENTS", "1"), encoding="utf-8")
        found.append(plugins.load_file("optimizer", str(path)))
    assert found[0].__name__ != found[1].__name__
    assert not list(tmp_path.rglob("__pycache__")), "folders of users stay as they are"


HELPED = POLICY.replace(
    "\n\nclass Mine",
    """
import IMPORTED
from near import SLOTS
from .parts.least import least
from parts import least as module
import parts.least


class Mine""",
).replace(
    "        knobs =",
    """        from late import agreed
        agreed(SLOTS, least(), module.least(), parts.least.least(), IMPORTED.SLOTS)
        knobs =""",
)
"""A policy that imports modules of its folder in all ways."""
LATE = "def agreed(*numbers):\n    assert len(set(numbers)) == 1, numbers\n"


@pytest.fixture
def helped(tmp_path: Path) -> Callable[[str, int], str]:
    """Returns a function that writes a policy to a folder, with a number of weight slots in
    modules of this folder.
    """

    def written(folder: str, slots: int) -> str:
        place = tmp_path / folder
        (place / "parts").mkdir(parents=True, exist_ok=True)
        (place / "mine.py").write_text(HELPED.replace("IMPORTED", "near"), encoding="utf-8")
        (place / "near.py").write_text(f"SLOTS = {slots}\n", encoding="utf-8")
        (place / "late.py").write_text(LATE, encoding="utf-8")
        least = "def least():\n    from ..near import SLOTS\n    return SLOTS\n"
        (place / "parts" / "least.py").write_text(least, encoding="utf-8")
        return str(place / "mine.py")

    return written


def test_a_file_imports_the_modules_of_its_own_folder(
    make_plan: Callable[..., Plan],
    helped: Callable[[str, int], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another folder has modules of the same names, and so does Python's own path."""
    first, other = make_plan(helped("a", 2), layers=6), make_plan(helped("b", 3), layers=6)
    (tmp_path / "path").mkdir()
    for name in ("near", "late", "parts"):
        (tmp_path / "path" / f"{name}.py").write_text("raise RuntimeError\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    assert [slots(first), slots(other), slots(first)] == [2, 3, 2]
    assert not list(tmp_path.rglob("__pycache__"))
    copy = Path(helped("copy", 2)).parent
    for name, content in plugins.source("policy", first.policy).items():
        (copy / name).write_bytes(content)
    before = plugins.digest("policy", first.policy)
    assert plugins.digest("policy", str(copy / "mine.py")) == before
    helped("a", 4)
    assert plugins.digest("policy", first.policy) == before, "what was loaded"
    assert slots(msgspec.structs.replace(first, policy=str(copy / "mine.py"))) == 2
    assert slots(first) == 4
    assert plugins.digest("policy", first.policy) != before


def test_a_cost_model_imports_a_module_of_its_folder(
    make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    plan, path = make_plan(), tmp_path / "wide.link.py"
    path.write_text("from slow import cost_model\n", encoding="utf-8")
    (tmp_path / "slow.py").write_text(COSTS.replace("FACTOR", "2"), encoding="utf-8")
    hardware = msgspec.structs.replace(H200, cost_model=str(path))
    op = next(op for op in policies.lower(plan).ops if op.kind == "forward")
    slow, usual = (
        cost_model(each, plan.model, plan.workload).duration_ns(op) for each in (hardware, H200)
    )
    assert slow == 2 * usual


def test_a_module_does_not_replace_one_of_python_or_of_this_package(tmp_path: Path) -> None:
    """A file may be in a folder that has a checkout of this package, or a `random.py`."""
    (tmp_path / "megatrain").mkdir()
    for name in ("random.py", "megatrain/__init__.py"):
        (tmp_path / name).write_text("raise RuntimeError\n", encoding="utf-8")
    path = tmp_path / "mine.py"
    path.write_text("import random\n" + OPTIMIZER.replace("MOMENTS", "1"), encoding="utf-8")
    assert plugins.load_file("optimizer", str(path)).Mine.moments == 1
    assert list(plugins.source("optimizer", str(path))) == [Path("mine.py")]


def test_a_module_does_not_replace_what_the_file_defines(tmp_path: Path) -> None:
    """Regression test: the modules of the folder were attributes of the file."""
    (tmp_path / "common.py").write_text("import limits\nfrom limits import most\n")
    (tmp_path / "limits.py").write_text("most = 3\n")
    path = tmp_path / "mine.py"
    path.write_text("limits = 7\nfrom common import most\n")
    found = plugins.load_file("policy", str(path))
    assert (found.limits, found.most) == (7, 3)


def test_a_relative_module_does_not_hide_one_of_python(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("Q = 1\n")
    path = tmp_path / "mine.py"
    path.write_text("from .queue import Q\nimport queue\nqueue.Queue()\n")
    assert plugins.load_file("policy", str(path)).Q == 1


def test_a_file_is_executed_again_after_an_edit_was_undone(tmp_path: Path) -> None:
    """It may have read other files that have changed meanwhile."""
    path, other = tmp_path / "mine.py", tmp_path / "rates.txt"
    reads = "from pathlib import Path\nRATES = Path(__file__).with_name('rates.txt').read_text()\n"
    for text, rates in ((reads, "one"), ("RATES = 'none'\n", "one"), (reads, "two")):
        path.write_text(text)
        other.write_text(rates)
        found = plugins.load_file("policy", str(path)).RATES
    assert found == "two"


def test_a_failure_in_a_module_names_its_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import near\n", encoding="utf-8")
    Path("near.py").write_text("\n\nnone.slots\n", encoding="utf-8")
    message = r"^policy mine\.py: found NameError while .*'none' .*\(near\.py, line 3\)"
    with pytest.raises(UserError, match=message):
        plugins.load_file("policy", "mine.py")


def test_every_cache_that_may_depend_on_a_file_is_forgotten_with_it() -> None:
    """A function whose arguments name a policy or an optimizer is cached with `plugins.cached`."""
    folder, found = Path(plugins.__file__).parents[1], 0
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
                arguments = [
                    f"{each.arg}: {ast.unparse(each.annotation) if each.annotation else ''}"
                    for each in node.args.args
                ]
                depends = any(
                    each.endswith((": Plan", ": Workload")) or each == "optimizer: str"
                    for each in arguments
                )
                plain = "lru_cache" in decorators or "functools.cache" in decorators.split()
                assert not (depends and plain), f"{file.name}: {node.name}"
                found += "plugins.cached" in decorators
    assert found > 10
