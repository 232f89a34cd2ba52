"""Tests of the text of a verdict: a whole YES and NO, the width, and what is left out."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.experiments.cli import options
from megatrain.experiments.cli.verdict import layout, policy_table, reasons
from megatrain.experiments.cli.verdict import text as verdict_text
from megatrain.runtime.host import WITHOUT_GPU
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Knobs, Placement
from megatrain.simulator.verdict.marginal_memory import MarginalMemory
from megatrain.simulator.verdict.multi_gpu import MultiGpu
from megatrain.simulator.verdict.suggestion import Suggestion
from megatrain.simulator.verdict.verdict import RunnerUp, TrainingEstimate, Verdict

CALIBRATION = Path(__file__).parents[2] / "shared" / "calibrations" / "default-set.toml"

GIB = 2**30
COMMANDS = [
    (
        ["megatrain", "plan", "somebody-7b", "--hardware", "rtx4090", "--batch", "4", "--out", "p"],
        "writes the plan",
    )
]


def sizes(**gib: float) -> dict[str, int]:
    """Returns bytes by class, from GiB."""
    return {name: round(size * GIB) for name, size in gib.items()}


FITS = Verdict(
    model="somebody-7b",
    parameters=7_615_616_512,
    active_parameters=7_615_616_512,
    hardware="rtx4090",
    machine="RTX 4090",
    host_memory_assumed=True,
    unified=False,
    gpus=1,
    workload=Workload(batch=4, sequence=2048, documents=True),
    model_longest_row=32_768,
    policy="overlapped",
    knobs={"weight_slots": 2, "chunk_bytes": 2**26, "placement": Placement(weights="e,0-3")},
    prediction_only=False,
    feasible=True,
    binding="cpu",
    step_seconds=6.02,
    step_seconds_low=4.816,
    step_seconds_high=7.224,
    tokens_per_second=1360.4,
    tokens_per_second_low=1133.7,
    tokens_per_second_high=1700.5,
    tflops_6n=62.2,
    tflops_6n_active=62.2,
    mfu=0.377,
    lower_bound_seconds=5.5,
    lower_bound_lane="cpu",
    exposed_seconds={"cpu": 1.2, "h2d": 0.4, "d2h": 0.14, "update": 0.001, "waiting": 0.0},
    step_shares={
        "compute": 0.711,
        "copies": 0.0897,
        "host_optimizer": 0.1992,
        "device_optimizer": 0.0001,
        "nothing_else": 0.0,
    },
    lane_seconds={"compute": 4.28, "cpu": 5.5},
    device_peak_bytes=round(23.1 * GIB),
    device_limit_bytes=round(23.5 * GIB),
    host_peak_bytes=round(87.2 * GIB),
    host_limit_bytes=192 * GIB,
    pools={},
    classes={
        "device": sizes(weights=6.1, gradients=3.8, moments=7.5, activations=2, workspace=3.7),
        "host": sizes(weights=24.2, gradients=12.3, moments=49.2, activations=1.5, staging=0.001),
    },
    calibrated="",
    uncertainty=0.2,
    extrapolated={},
    longest_context=57_700,
    largest_batch=28,
    runner_up=RunnerUp(policy="k_buffer", step_seconds=7.5, at_least=True),
    one_more_gib=(
        MarginalMemory(
            place="device",
            step_seconds=6.0,
            tokens_per_second=1365.3,
            gain=0.0036,
            knobs=Knobs(weight_slots=3, placement=Placement(weights="e,0-4")),
        ),
        MarginalMemory(place="host", step_seconds=6.02, tokens_per_second=1360.4, gain=0.0),
    ),
    advice=(
        Suggestion(
            change="--clipping none",
            options={"clipping": "none"},
            fits=True,
            tokens_per_second=1910.2,
            gain=0.404,
            note="gives up clipping",
        ),
        Suggestion(
            change="--state bf16-sr",
            options={"state": "bf16-sr"},
            compressed=True,
            fits=True,
            gain=0.05,
            note="not exact AdamW",
        ),
    ),
    training=TrainingEstimate(
        tokens=10_000_000,
        hours=2.04,
        hours_low=1.63,
        hours_high=2.45,
        days=0.085,
        energy_kwh=0.918,
        watts=450.0,
    ),
)
YES = """\
YES     Full fine-tuning of somebody-7b (7.62 B) fits on one RTX 4090 with
        23.5 GiB of VRAM and 192 GiB of RAM (assumed free; give yours by
        --host-memory).

Speed   1,360 tokens/s (1,130 to 1,700; from datasheets, not measured)
        6.02 s a step of 4 x 2,048 tokens, MFU 38%
Time    10 M tokens in 2.0 hours (1.6 to 2.5), 0.918 kWh of GPU energy
VRAM    23.1 of  23.5 GiB  ####################
        weights 6.1  gradients 3.8  optimizer 7.5  activations 2.0
        temporary 3.7
RAM     87.2 of 192.0 GiB  #########...........
        weights 24.2  gradients 12.3  optimizer 49.2  activations 1.5
Step    GPU computes 71%, waits for the optimizer on the CPU 20%, for copies 9%

Room    a context of up to 57,700 tokens (the model's own limit is 32,768), or
        28 sequences of 2,048
Faster  --clipping none  +40%  1,910 tokens/s  gives up clipping

Next    megatrain plan somebody-7b --hardware rtx4090 --batch 4 --out p
            # writes the plan
        --why adds what is kept where, the runner-up and the bounds"""
FAILS = msgspec.structs.replace(
    FITS,
    feasible=False,
    host_memory_assumed=False,
    workload=Workload(batch=1, sequence=65_536),
    binding="host.moments",
    reason="the nearest plan lacks 52.36 GiB of host memory",
    step_shares={},
    host_peak_bytes=round(180.4 * GIB),
    host_limit_bytes=128 * GIB,
    longest_context=0,
    largest_batch=0,
    training=None,
    advice=(
        Suggestion(
            change="--host-memory 178GiB, 50.00 GiB more",
            options={"host-memory": "178GiB"},
            fits=True,
            tokens_per_second=121.2,
        ),
        Suggestion(
            change="--hardware h200",
            options={"hardware": "h200"},
            fits=True,
            tokens_per_second=4699.3,
            note="H200, with 251 GiB of RAM",
        ),
        Suggestion(
            change="somebody-3b",
            model="somebody-3b",
            fits=True,
            tokens_per_second=8.25,
            note="a smaller model",
        ),
        Suggestion(
            change="--clipping none",
            options={"clipping": "none"},
            fits=False,
            bytes_missing=24 * GIB,
        ),
    ),
)
NO = """\
NO      Full fine-tuning of somebody-7b (7.62 B) does not fit on one RTX 4090
        with 23.5 GiB of VRAM and 128 GiB of RAM. With 1 x 65,536 tokens a
        micro-batch it needs 178 GiB of RAM.

VRAM     23.1 of  23.5 GiB  ####################
        weights 6.1  gradients 3.8  optimizer 7.5  activations 2.0
        temporary 3.7
RAM     180.4 of 128.0 GiB  ####################
        52.4 GiB too little
        weights 24.2  gradients 12.3  optimizer 49.2  activations 1.5
Note    the memory is that of the plan that comes nearest to fitting; another
        plan fits with 178 GiB of RAM
Note    sequences of 65,536 tokens are longer than the model's own limit of
        32,768 (max_position_embeddings)

Room    no micro-batch fits, not even the smallest
What would do
        --host-memory 178GiB    121 tokens/s
        --hardware h200       4,699 tokens/s  H200, with 251 GiB of RAM
        somebody-3b             8.2 tokens/s  a smaller model"""
SEVERAL = MultiGpu(
    gpus=8,
    step_seconds=6.5,
    tokens_per_second=10_000.0,
    speedup=7.4,
    host_peak_bytes=200 * GIB,
    host_limit_bytes=128 * GIB,
    feasible=False,
    gb_per_s=21.9,
    gb_per_s_both=10.9,
)


def changed(**fields: Any) -> Verdict:
    """Returns the verdict `FITS` with changed fields."""
    return msgspec.structs.replace(FITS, **fields)


def flat(text: str) -> str:
    """Returns the text without line breaks and columns."""
    return " ".join(text.split())


def test_the_whole_text_of_a_yes() -> None:
    assert verdict_text.text(FITS, commands=COMMANDS) == YES


def test_the_whole_text_of_a_no() -> None:
    assert verdict_text.text(FAILS) == NO


def with_several(verdict: Verdict, **fields: Any) -> str:
    """Returns the text on `verdict` with `SEVERAL`, which has changed fields."""
    several = msgspec.structs.replace(SEVERAL, **fields)
    return flat(verdict_text.text(msgspec.structs.replace(verdict, multi_gpu=several)))


def test_several_gpus_are_compared_with_one_only_if_the_model_fits_on_one() -> None:
    shown = with_several(FITS, feasible=True)
    assert "8 GPUs 10,000 tokens/s, 7.4 times one GPU, 6.50 s a step (" in shown
    shown = with_several(FAILS, feasible=True)
    assert "8 GPUs 10,000 tokens/s, 6.50 s a step (" in shown
    assert "times one GPU" not in shown


@pytest.mark.parametrize("verdict", [FITS, FAILS], ids=["one fits", "one does not fit"])
def test_several_gpus_that_do_not_fit_have_no_speed_but_what_they_need(verdict: Verdict) -> None:
    work = msgspec.structs.replace(verdict.workload, batch=2, accumulation=8 * 3)
    shown = with_several(verdict, workload=work)
    ram = "8 GPUs DOES NOT FIT: the nearest plan needs 200 GiB of RAM (128 GiB given)"
    assert f"{ram} with --batch 2 and --accumulation 3" in shown
    limit = verdict_text.layout.size(verdict.device_limit_bytes)
    vram = f"100 GiB of VRAM of each GPU ({limit} given)"
    assert f"{ram} and {vram}" in with_several(verdict, device_peak_bytes=100 * GIB)
    shown = with_several(verdict, host_peak_bytes=1, device_peak_bytes=100 * GIB)
    assert f"the nearest plan needs {vram}" in shown
    assert "10,000 tokens/s" not in shown


@pytest.mark.parametrize("verdict", [FITS, FAILS], ids=["one fits", "one does not fit"])
def test_several_gpus_that_cannot_train_have_a_reason_and_no_speed(verdict: Verdict) -> None:
    shown = with_several(verdict, feasible=True, refused="workload: found this; allowed: that")
    assert "8 GPUs cannot train this: workload: found this; allowed: that" in shown
    assert "10,000 tokens/s" not in shown


def test_advice_beside_several_gpus_is_for_one() -> None:
    assert "Faster on one GPU --" in with_several(FITS, feasible=True)
    assert "What would do on one GPU --" in with_several(FAILS)


@pytest.mark.parametrize("width", [80, 60, 50])
@pytest.mark.parametrize("verdict", [FITS, FAILS], ids=["yes", "no"])
def test_no_line_is_wider_than_the_terminal(verdict: Verdict, width: int) -> None:
    whole = msgspec.structs.replace(verdict, multi_gpu=SEVERAL)
    lines = verdict_text.text(whole, width, why=True, commands=COMMANDS).splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if line != line.rstrip()]
    assert "\n".join(lines).isascii()


def test_the_plan_is_shown_only_with_why() -> None:
    words = ("weight_slots", "e,0-3", "k_buffer", "one more GiB", "TFLOPS", "--state bf16-sr")
    plain, why = flat(verdict_text.text(FITS)), flat(verdict_text.text(FITS, why=True))
    assert not [word for word in words if word in plain]
    assert all(word in why for word in words)
    assert "no order of these operations takes less than 5.500 s (cpu)" in why
    assert "Second policy k_buffer, at least 7.500 s, 24.6% slower" in why
    assert "--state bf16-sr at least +5%: not exact AdamW" in why


def test_mfu_is_shown_apart_from_the_share_of_the_measured_rate() -> None:
    text = flat(verdict_text.text(changed(matmul_rate_share=0.789), why=True))
    assert "37.7% of the datasheet's peak (MFU)" in text
    assert "78.9% of the measured matrix-product rate" in text
    assert "MFU" not in verdict_text.text(changed(mfu=None))


def test_insufficient_changes_are_shown_only_if_none_suffices() -> None:
    short = FAILS.advice[-1]
    text = verdict_text.text(msgspec.structs.replace(FAILS, advice=(short,)))
    assert "What would help\n        --clipping none  not enough: 24 GiB still missing" in text
    assert "it lacks 52.4 GiB of RAM" in flat(text)
    assert "not enough" not in NO


def test_one_memory_has_one_bar() -> None:
    text = verdict_text.text(changed(unified=True))
    assert "fits on one RTX 4090 with 23.5 GiB of memory." in flat(text)
    assert [line[:8] for line in text.splitlines() if "##" in line] == ["Memory  "]


def test_the_memory_of_a_small_model_is_not_shown_as_zero() -> None:
    small = changed(
        device_peak_bytes=24 * 2**20,
        classes={"device": {"weights": 24 * 2**20, "staging": 100}, "host": {}},
        host_peak_bytes=0,
    )
    text = verdict_text.text(small)
    assert "VRAM    24.0 MiB of  23.5 GiB  ...................." in text
    assert "        weights 24.0\n" in text


@pytest.mark.parametrize(
    ("hours", "shown"),
    [(0.25, "15 minutes"), (2.04, "2.0 hours"), (47.9, "47.9 hours"), (49.0, "2.0 days")],
)
def test_time_is_in_hours_up_to_two_days(hours: float, shown: str) -> None:
    assert FITS.training is not None
    training = msgspec.structs.replace(
        FITS.training, hours=hours, hours_low=None, hours_high=None, energy_kwh=None
    )
    text = verdict_text.text(changed(training=training))
    assert f"Time    10 M tokens in {shown}\n" in text


def test_a_calibrated_machine_says_when_it_was_measured() -> None:
    text = verdict_text.text(
        changed(
            machine="machine here",
            calibrated="2026-11-21",
            extrapolated={"norm": 3},
            host_memory_assumed=False,
        ),
        why=True,
    )
    assert "fits on machine here with 23.5 GiB of VRAM and 192 GiB of RAM." in flat(text)
    assert "(1,130 to 1,700; measured 2026-11-21)" in text
    exact = changed(
        calibrated="2026-11-21", tokens_per_second_low=1360.1, tokens_per_second_high=1360.9
    )
    assert "1,360 tokens/s (measured 2026-11-21)" in verdict_text.text(exact)
    assert "some operations were not measured in this size; --why names them" in flat(text)
    assert "outside the measured range: norm (3 ops)" in flat(text)


@pytest.mark.parametrize(
    ("width", "missing"),
    [(80, []), (60, ["step", "most work"]), (50, ["step", "RAM", "most work"])],
)
def test_a_narrow_table_of_policies_has_whole_columns(width: int, missing: list[str]) -> None:
    slow = changed(
        policy="fsdp2_offload", prediction_only=True, feasible=False, host_limit_bytes=GIB
    )
    lines = policy_table.table([FITS, slow], width).splitlines()
    assert max(map(len, lines)) <= width
    names = ("step", "hours", "VRAM", "RAM", "most work")
    assert [name for name in names if f" {name}" not in lines[0]] == missing
    assert lines[1].split()[:2] == (["overlapped", "1,360"] if missing else ["overlapped", "6.02"])
    assert "OOM" in lines[2]
    said = [f"left out in {width} columns: {', '.join(missing)}"] if missing else []
    assert lines[3:-1] == said


def test_a_bar_is_shorter_where_the_numbers_are_long() -> None:
    large = changed(
        device_peak_bytes=24 * GIB, host_peak_bytes=20_000 * GIB, host_limit_bytes=10_000 * GIB
    )
    for width, bar in ((80, 20), (50, 16)):
        lines = verdict_text.memory(large, width)
        assert max(map(len, lines)) <= width
        assert [line.count("#") for line in lines if "##" in line] == [bar, bar]


def test_a_row_that_is_too_wide_is_broken_between_its_cells() -> None:
    cells = [
        ("--hardware rtx-pro-6000-of-somebody", "+404%", "1,910 tokens/s", "a note"),
        ("b",) * 4,
    ]
    assert layout.rows(cells, 50) == [
        "        --hardware rtx-pro-6000-of-somebody",
        "            +404%  1,910 tokens/s  a note",
        "        b",
        "            b  b  b",
    ]


def test_the_table_of_policies_is_no_wider_than_a_terminal() -> None:
    peer = changed(policy="zero3_offload", prediction_only=True, host_limit_bytes=GIB)
    peer = msgspec.structs.replace(peer, feasible=False, training=None)
    lines = policy_table.table([FITS, peer]).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[:3] == ["overlapped", "6.02", "s"]
    assert lines[2].split()[:3] == ["zero3_offload", "*", "OOM"]
    assert lines[2].endswith("86.2 GiB RAM")
    assert lines[3] == "* another system, for prediction only"


@pytest.mark.parametrize("columns", ["30", "60", "200", ""])
def test_the_width_is_that_of_the_terminal_within_reason(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert layout.terminal_width() == {"30": 50, "60": 60}.get(columns, 80)


def test_the_examples_in_the_docstrings_of_the_layout_are_right() -> None:
    failures, attempted = doctest.testmod(layout)
    assert attempted > 10
    assert failures == 0


def test_the_suggested_fix_is_the_first_change_that_suffices() -> None:
    assert verdict_text.remedy(FAILS) == "--host-memory 178GiB would fit (121 tokens/s)"
    later = msgspec.structs.replace(FAILS, advice=FAILS.advice[1:])
    expected = "--hardware h200 would fit (H200, with 251 GiB of RAM, 4,699 tokens/s)"
    assert verdict_text.remedy(later) == expected
    insufficient = msgspec.structs.replace(FAILS, advice=FAILS.advice[-1:], reason="1 GiB lack")
    assert verdict_text.remedy(insufficient) == "1 GiB lack"


def test_an_empty_placement_is_described_in_words() -> None:
    """The text is not `activations of none saved`."""
    here = Knobs(placement=Placement(saved_activations="1-2"))
    margin = msgspec.structs.replace(FITS.one_more_gib[0], knobs=Knobs())
    changed = msgspec.structs.replace(
        FITS, knobs={**FITS.knobs, "placement": here.placement}, one_more_gib=(margin,)
    )
    assert "no activations saved" in " ".join(reasons.marginal_gains(changed))


def test_a_verdict_on_unknown_memory_names_its_condition() -> None:
    condition = "compiled layers with linear attention take at most 1 GiB more than eager ones"
    unsure = msgspec.structs.replace(FITS, fits_if=condition, fits_if_bytes=GIB)
    assert f"(assumed free; give yours by --host-memory), if {condition}." in flat(
        verdict_text.text(unsure)
    )
    assert ", if " not in flat(verdict_text.text(FITS))


def test_a_machine_without_a_gpu_says_what_its_vram_is() -> None:
    sentence = "Note without a GPU, a part of the RAM stands in for GPU memory "
    assert sentence in flat(verdict_text.text(FITS, about_machine=[WITHOUT_GPU]))
    assert sentence not in flat(verdict_text.text(FITS))


def test_layers_that_are_not_compiled_are_a_note() -> None:
    note = "3 of 4 layers are not compiled, since layers with linear attention always run eagerly"
    eager = msgspec.structs.replace(FITS, eager=note)
    assert note in verdict_text.notes(eager)
    assert f"Note {note}" in flat(verdict_text.text(eager))


@pytest.mark.parametrize(("pieces", "noted"), [(30_000, False), (50_000, True)])
def test_the_model_s_own_limit_is_named_if_only_pieces_exceed_it(pieces: int, noted: bool) -> None:
    verdict = msgspec.structs.replace(
        FITS, longest_context=20_000, longest_context_in_pieces=pieces, largest_batch=None
    )
    limit = " (the model's own limit is 32,768)" if noted else ""
    assert verdict_text.room(verdict) == (
        f"a context of up to 20,000 tokens, {pieces:,} with --token-piece 2048{limit}"
    )


@pytest.mark.parametrize("streams", [False, True])
def test_rebuilt_outputs_are_described_in_words(streams: bool) -> None:
    """A plan that saves them does not say so, unless another plan differs in it."""
    texts = []
    for rebuild in (0, 1):
        knobs = {"checkpoint_interval": 1, "rebuild_outputs": rebuild, "placement": Placement()}
        margin = MarginalMemory(
            place="device",
            step_seconds=6.0,
            tokens_per_second=1370.0,
            gain=0.007,
            knobs=Knobs(rebuild_outputs=1 - rebuild),
        )
        verdict = msgspec.structs.replace(
            FITS, knobs=knobs, streams=streams, one_more_gib=(margin,)
        )
        texts.append((" ".join(reasons.reasons(verdict, 999)), reasons.marginal_gains(verdict)[0]))
    (saving, gains_rebuilt), (rebuilt, gains_saved) = texts
    assert "outputs of norms and gates" not in saving.partition("one more GiB")[0]
    assert "outputs of norms and gates rebuilt" in rebuilt.partition("one more GiB")[0]
    assert ": outputs of norms and gates rebuilt, with" in gains_rebuilt
    assert ": outputs of norms and gates saved, with" in gains_saved
    assert "rebuild_outputs" not in "".join([saving, rebuilt, gains_rebuilt, gains_saved])


def test_a_model_whose_layers_were_not_measured_is_noted() -> None:
    measured = HardwareSpec.load(str(CALIBRATION))
    (note,) = options.machine_notes(measured, ModelSpec.load("mistral-7b"))
    assert note.startswith("the layers of this model were not measured on this machine; ")
    assert options.machine_notes(measured, ModelSpec.load("llama-3.1-8b")) == []
    assert options.machine_notes(HardwareSpec.load("h200"), ModelSpec.load("mistral-7b")) == []


def test_speeds_of_a_batch_that_was_not_given_are_those_of_that_batch() -> None:
    """Without `--batch`, a change that makes the model fit also chooses a larger micro-batch."""
    chosen = msgspec.structs.replace(FAILS, batch_chosen=True)
    note = "speeds are those of 1 x 65,536 tokens; without --batch, these changes choose a larger"
    assert note in flat(verdict_text.text(chosen))
    assert note not in flat(verdict_text.text(FAILS))


def test_a_cost_model_from_outside_is_named_and_is_not_a_measurement() -> None:
    shown = flat(verdict_text.text(changed(cost_model="half_link.py"), why=True))
    assert "by the cost model half_link.py" in shown
    assert "measured 20" not in shown
