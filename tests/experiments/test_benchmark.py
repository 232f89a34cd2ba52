"""Tests of the benchmark: the timed systems, the result file, the table and the error messages.

The systems `ours` and `ceiling` run by the real command on the CPU. A system that cannot run still
has a line in the table.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from outside_optimizers import TEXTS

from megatrain.experiments import benchmark
from megatrain.experiments.baselines import fsdp2, zero3
from megatrain.experiments.benchmarks import batches, child, own
from megatrain.experiments.benchmarks.steps import Parts, Reading, WorkStep
from megatrain.runtime.layers.documents import begins
from megatrain.runtime.memory.fitting import LOADING_BYTES
from megatrain.runtime.memory.process_memory import host_peak_bytes
from megatrain.simulator.hardware.cost_table import COMPUTE_KINDS
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import restricted_to_kinds
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline

WORK = ["--batch", "2", "--seq", "16", "--loss-chunk", "16", "--steps", "3", "--device", "cpu"]


@pytest.fixture(scope="module")
def timed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Returns the standard output of the command and the content of its result file.

    Device memory is too small for the training state, so layers are streamed.
    """
    out = tmp_path_factory.mktemp("timed") / "result.json"
    words = [
        str(prepared / "tiny"),
        *WORK,
        "--device-memory",
        "164640KiB",  # 800 KiB, and 160 MiB for libraries
        "--systems",
        "ours,ceiling,zero3",
        "--out",
        str(out),
        "--timeline",
        str(out.with_name("timeline.json")),
    ]
    shown = io.StringIO()
    started = benchmark.time_system

    def timed(system: str, *given: Any) -> dict[str, Any]:
        """Times `ours` in a process of its own, as the command does, and others in this one."""
        if system == "ours":
            return started(system, *given)
        found: dict[str, Any] = json.loads(msgspec.json.encode(child.attempt(system, *given)))
        return found

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(benchmark, "time_system", timed)
        assert benchmark.main(words) == 0
    return shown.getvalue(), json.loads(out.read_text())


def test_the_file_has_all_results(timed: tuple[str, dict[str, Any]]) -> None:
    shown, result = timed
    assert result["plan"]["policy"] in shown
    assert result["machine"]["cores"] >= 1
    assert (result["arguments"]["steps"], result["tokens_per_step"], result["model"]) == (
        3,
        32,
        "tiny",
    )
    assert result["commit"] is None or len(result["commit"].removesuffix("+")) == 40
    ours, ceiling, _ = result["systems"]
    for record in (ours, ceiling):
        assert (len(record["steps"]), record["steady_steps"], record["failure"]) == (3, 1, "")
        assert all(math.isfinite(step["loss"]) and step["seconds"] > 0 for step in record["steps"])
        assert record["step_seconds_median"] == record["steps"][2]["seconds"]
        assert record["tokens_per_second"] == pytest.approx(32 / record["step_seconds_median"])
        assert record["tflops_6n"] == pytest.approx(
            6 * result["parameters"] * record["tokens_per_second"] / 1e12
        )
        assert record["device_peak_bytes"] > 0
        assert record["host_peak_bytes"] > 10 * 2**20
        assert record["times_ours"] == pytest.approx(
            record["step_seconds_median"] / ours["step_seconds_median"]
        )
    assert ours["steps"][2]["gradient_norm"] > 0
    assert ceiling["steps"][2]["gradient_norm"] is None


def test_the_timeline_of_the_last_step_of_ours(timed: tuple[str, dict[str, Any]]) -> None:
    result = timed[1]
    timeline = Timeline.load(Path(result["arguments"]["timeline"]))
    ours = result["systems"][0]
    assert timeline.digest == result["plan"]["digest"]
    assert len(timeline.spans) == ours["ops"]
    assert 0 < timeline.makespan_ns < ours["steps"][-1]["seconds"] * 1e9


def test_the_ceiling_has_compute_ops_alone(timed: tuple[str, dict[str, Any]]) -> None:
    ours, ceiling, _ = timed[1]["systems"]
    assert (
        ceiling["ops"] == 15
    )  # embed; 4 layers forward, recomputed and backward; head; embed backward
    assert ceiling["ops"] < ours["ops"]
    assert ceiling["device_peak_bytes"] <= ours["device_peak_bytes"]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is there")
def test_a_missing_package_is_a_line_of_the_table(timed: tuple[str, dict[str, Any]]) -> None:
    shown, result = timed
    assert result["systems"][2]["failure"] == "not installed: deepspeed"
    assert [line.split(None, 1)[1] for line in shown.splitlines() if line.startswith("zero3")] == [
        "not installed: deepspeed"
    ]


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        ("overlapped", {}),
        ("overlapped", {"clipping": "none", "accumulation": 2}),
        ("double_buffer", {"tied": True, "accumulation": 2}),
        ("resident", {"checkpoint_interval": 2}),
    ],
)
def test_a_ceiling_of_any_policy_runs(
    make_plan: Callable[..., Plan], tmp_path: Path, policy: str, changes: dict[str, Any]
) -> None:
    plan = make_plan(policy, **changes)
    schedule = lower(plan)
    path = tmp_path / "plan.toml"
    msgspec.structs.replace(plan, digest=schedule.digest).save(path)
    found = child.attempt("ceiling", path, 2, "cpu")
    assert found.failure == ""
    assert found.ops == sum(op.kind in COMPUTE_KINDS for op in schedule.ops)
    assert all(math.isfinite(step.loss) for step in found.steps)
    kept = restricted_to_kinds(schedule, COMPUTE_KINDS)
    assert [op.id for op in kept.ops] == [op.id for op in schedule.ops if op.kind in COMPUTE_KINDS]
    assert not any(op.after for op in kept.ops)  # ops of one lane run in order anyway
    assert all(buffer.place == "device" for buffer in kept.buffers)


def test_restricted_keeps_what_ops_wait_for_among_themselves(
    make_plan: Callable[..., Plan],
) -> None:
    schedule = lower(make_plan("double_buffer", accumulation=2))
    kept = restricted_to_kinds(schedule, ("load_weights", *COMPUTE_KINDS))
    waits = {op.id: op.after for op in kept.ops}
    assert any(waits.values())
    for op in kept.ops:
        assert waits[op.id] == tuple(
            other for other in schedule.by_id[op.id].after if other in waits
        )


def test_ours_times_the_steps_of_the_executor(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan("double_buffer", dtype="fp32")
    plan = msgspec.structs.replace(plan, digest=lower(plan).digest)
    first, second = (own.measure("ours", plan, 2, torch.device("cpu")) for _ in range(2))
    assert [step.loss for step in first.steps] == [step.loss for step in second.steps]
    assert len({step.loss for step in first.steps}) == 2  # every step has different tokens


@pytest.mark.parametrize(("length", "firsts"), [(None, [0]), (6, [0, 6, 12])])
def test_ours_trains_documents_of_the_predicted_length(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    length: int | None,
    firsts: list[int],
) -> None:
    plan = make_plan("double_buffer", dtype="fp32", documents=True)
    work = msgspec.structs.replace(plan.workload, document_length=length)
    plan = msgspec.structs.replace(plan, workload=work, digest=lower(plan).digest)
    seen: list[Any] = []
    step = own.Executor.step

    def recorded(self: Any, batches: Any, **options: Any) -> Any:
        seen.extend(batches)
        return step(self, batches, **options)

    monkeypatch.setattr(own.Executor, "step", recorded)
    own.measure("ours", plan, 1, torch.device("cpu"))
    for batch in seen:
        for row in begins(batch.documents):
            assert row.nonzero().flatten().tolist() == firsts


@pytest.mark.nightly  # a process of its own, which imports torch
def test_fsdp2_on_the_cpu(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    """FSDP2 runs in its own process. Without a GPU it shards and clips but offloads nothing."""
    make_plan("double_buffer", accumulation=2).save(tmp_path / "plan.toml")
    found = benchmark.time_system("fsdp2", tmp_path / "plan.toml", 3, "cpu")
    assert found["failure"] == ""
    assert "clipped" in found["notes"]
    for step in found["steps"]:
        assert set(step["parts"]) == {"forward", "backward", "clipping", "optimizer"}
        assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
        assert abs(step["loss"] - math.log(256)) < 0.5  # an untrained model of 256 tokens
        assert step["gradient_norm"] > 0


def test_the_settings_of_deepspeed(make_plan: Callable[..., Plan]) -> None:
    settings = zero3.settings(make_plan(batch=3, accumulation=4).workload)
    assert (
        settings["train_micro_batch_size_per_gpu"],
        settings["gradient_accumulation_steps"],
        settings["gradient_clipping"],
    ) == (3, 4, 1.0)
    assert {
        settings["zero_optimization"][f"offload_{what}"]["device"]
        for what in ("param", "optimizer")
    } == {"cpu"}
    assert zero3.settings(make_plan(clipping="none").workload)["gradient_clipping"] == 0


def test_a_process_that_dies_is_a_line_of_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark.sys, "executable", "/bin/false")
    found = benchmark.time_system("ours", tmp_path / "plan.toml", 3, "cpu")
    assert found["failure"] == "its process ended with status 1 and without a result"


def test_an_error_in_a_child_process_is_returned_as_its_failure(
    tmp_path: Path, make_plan: Callable[..., Plan]
) -> None:
    path = tmp_path / "plan.toml"
    assert "found no such file" in child.attempt("ours", path, 3, "cpu").failure
    make_plan("double_buffer", device_limit_bytes=1000).save(path)
    assert child.attempt("ours", path, 3, "cpu").failure.startswith("plan: digest: found ''")


@pytest.mark.parametrize("system", benchmark.OWN)
def test_a_plan_that_needs_more_memory_than_the_machine_has_is_not_run(
    make_plan: Callable[..., Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    system: str,
) -> None:
    """Otherwise the system ends the process, or another one. A calibrated machine may grow, so the
    command only warns.
    """
    ran: list[Plan] = []

    def run(plan: Plan, *_: object, **__: object) -> None:
        ran.append(plan)
        raise RuntimeError("it would run")

    monkeypatch.setattr(own, "Executor", run)
    for name in ("host_bytes", "free_host_bytes"):
        monkeypatch.setattr(own, name, lambda: LOADING_BYTES)  # nothing is left for pools
    plan = make_plan("double_buffer")
    plan = msgspec.structs.replace(plan, digest=lower(plan).digest)
    plan.save(tmp_path / "plan.toml")
    found = child.attempt(system, tmp_path / "plan.toml", 3, "cpu")
    assert "memory: found a plan that needs 12" in found.failure
    assert "allowed: 128.00 MiB, what this machine has; fix: make a plan" in found.failure
    assert (found.steps, ran) == ((), [])
    calibrated = Path(benchmark.__file__).parent / "results" / "h200-heldout" / "hardware.toml"
    msgspec.structs.replace(plan, hardware=str(calibrated)).save(tmp_path / "plan.toml")
    found = child.attempt(system, tmp_path / "plan.toml", 3, "cpu")
    assert (found.failure, len(ran)) == ("RuntimeError: it would run", 1)
    assert "of host memory, and 128.00 MiB are free now: close other" in capsys.readouterr().err


def test_the_processes_find_the_machine_of_a_plan(
    make_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan names its hardware file from its own folder, and the processes read a copy."""
    (tmp_path / "plans").mkdir()
    library = Path(benchmark.__file__).parents[1] / "simulator" / "library" / "hardware"
    shutil.copy(library / "h200.toml", tmp_path / "hardware.toml")
    plan = make_plan("double_buffer", hardware="../hardware.toml")
    msgspec.structs.replace(plan, digest=lower(plan).digest).save(tmp_path / "plans/plan.toml")
    monkeypatch.chdir(tmp_path)
    named: list[Path] = []

    def timed(system: str, path: Path, *_: object) -> dict[str, Any]:
        named.append(Path(Plan.load(path).hardware))
        return {"system": system, "failure": "not timed", "steps": []}

    monkeypatch.setattr(benchmark, "time_system", timed)
    assert benchmark.main(["--plan", "plans/plan.toml", "--systems", "ours"]) == 1
    assert [path.resolve() for path in named] == [tmp_path / "hardware.toml"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "MODEL, --plan: found neither; allowed: one of them"),
        (["tiny", "--plan", "plan.toml"], "MODEL, --plan: found both"),
        (
            ["--plan", "plan.toml", "--batch", "4", "--compile"],
            "--plan: found --batch, --compile as well",
        ),
        (
            ["--plan", "plan.toml", "--state", "master24", "--gradients", "8bit"],
            "--plan: found --state, --gradients as well",
        ),
        (
            ["--plan", "plan.toml", "--hardware", "rtx4090"],
            "--plan: found --hardware as well; allowed: the plan's own settings",
        ),
        (["--plan", "none.toml"], "none.toml: found no such file"),
        (
            ["tiny", "--systems", "ours,zero4"],
            "--systems: found 'zero4'; allowed: ours, ceiling, zero3, fsdp2",
        ),
        (["tiny", "--steps", "2"], "--steps: found '2'; allowed: a whole number >= 3"),
        (["tiny", "--hardware", "h2000"], "found"),
        (["tiny", "--device-memory", "1KiB"], "tiny: found no plan that fits"),
        (
            ["tiny", "--policy", "zero3_offload"],
            "plan: policy: found zero3_offload, the policy of another system",
        ),
        (["tiny", "--nonsense"], "found --nonsense"),
        (
            ["tiny", "--timeline", "step.json", "--systems", "ceiling,zero3"],
            "--timeline: found --systems ceiling,zero3; allowed: systems with `ours`",
        ),
        (
            ["tiny", "--optimizer", "lion.py", "--systems", "ours,fsdp2"],
            "optimizer: found lion.py, with fsdp2; allowed: adamw, which other systems use",
        ),
        (
            ["tiny", "--token-piece", "5", "--systems", "ours,fsdp2"],
            "--token-piece: found 5, with fsdp2; allowed: no pieces",
        ),
    ],
)
def test_mistakes_give_one_line_errors(
    words: list[str], complaint: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "lion.py").write_text(TEXTS[1])
    assert benchmark.main(words) == (3 if "no plan that fits" in complaint else 2)
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("benchmark: ")
    assert complaint in shown.err
    assert shown.out == ""


def test_parts_add_up() -> None:
    parts = Parts(torch.device("cpu"))
    for _ in range(2):
        with parts.time("forward"):
            pass
    assert list(parts.seconds) == ["forward"]
    assert parts.seconds["forward"] > 0
    assert (host_peak_bytes() or 0) > 2**20


def test_batches_share_a_model_and_a_failed_batch_ends_them(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch has steps of its own size. The batches after one that fails are named."""
    plan, sizes = make_plan("double_buffer"), []

    def prepare(plan: Plan, _: torch.device) -> tuple[WorkStep, str]:
        sizes.append(plan.workload.batch)

        def step(number: int, work: Workload) -> Reading:
            if work.batch == 4:
                raise RuntimeError("no memory left\nand more")
            return Reading(seconds=number * work.batch, loss=1.0)

        return step, "a system"

    monkeypatch.setattr(fsdp2, "prepare", prepare)
    found = list(batches.measure("fsdp2", plan, [1, 2, 4, 8], 3, torch.device("cpu")))
    assert sizes == [1]  # the model is prepared once
    assert [work.batch for work, _ in found] == [1, 2, 4, 8]
    assert [[step.seconds for step in steps.steps] for _, steps in found] == [
        [1, 2, 3],
        [2, 4, 6],
        [],
        [],
    ]
    assert [steps.failure for _, steps in found] == [
        "",
        "",
        "RuntimeError: no memory left",
        "not run, because batch 4 failed",
    ]


def test_a_run_of_batches_that_is_ended_keeps_those_before(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file is written after each batch."""
    file = tmp_path / "batches.json"

    def prepare(_: Plan, __: torch.device) -> tuple[WorkStep, str]:
        def step(number: int, work: Workload) -> Reading:
            if work.batch == 4:
                raise KeyboardInterrupt
            return Reading(seconds=number * work.batch, loss=1.0)

        return step, "a system"

    monkeypatch.setattr(fsdp2, "prepare", prepare)
    words = ["fsdp2", str(prepared / "tiny"), "--steps", "3", "--device", "cpu", "--out", str(file)]
    with pytest.raises(KeyboardInterrupt):
        batches.run([*words, "--batches", "1,2,4,8"])
    found = json.loads(file.read_text())
    assert [entry["batch"] for entry in found["batches"]] == [1, 2]
    assert all(entry["step_seconds_median"] for entry in found["batches"])
    assert found["model"] == "tiny"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("NEEDS", ("no_such_package",), "not installed: no_such_package"),
        ("DEVICES", ("cuda",), "needs a CUDA GPU"),
    ],
)
def test_no_batch_runs_if_the_system_cannot(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    value: tuple[str],
    reason: str,
) -> None:
    monkeypatch.setattr(fsdp2, field, value)
    monkeypatch.setattr(fsdp2, "prepare", None)  # it is not called
    plan = make_plan("double_buffer")
    found = list(batches.measure("fsdp2", plan, [1, 2], 3, torch.device("cpu")))
    assert [steps.failure for _, steps in found] == [reason] * 2
