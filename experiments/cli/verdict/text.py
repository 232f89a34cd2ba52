"""Formats a verdict as text: the answer first, then speed, memory and advice.

Every number is a field of the verdict. `reasons.py` formats the reasons for the verdict.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatrain.experiments.cli.verdict import layout
from megatrain.experiments.cli.verdict.layout import labelled
from megatrain.experiments.cli.verdict.reasons import rates_source, reasons, without_cuda
from megatrain.simulator.base.units import counted, format_bytes, parse_bytes
from megatrain.simulator.model.attention_kernel import is_deterministic
from megatrain.simulator.model.optimizer import ADAMW
from megatrain.simulator.model.state_format import EXACT, FORMATS
from megatrain.simulator.model.workload import LEAST_PIECE
from megatrain.simulator.verdict.suggestion import as_options

if TYPE_CHECKING:
    from megatrain.simulator.model.workload import Workload
    from megatrain.simulator.verdict.multi_gpu import MultiGpu, NetworkCost
    from megatrain.simulator.verdict.suggestion import Suggestion
    from megatrain.simulator.verdict.verdict import Verdict

CLASS_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "moments": "optimizer",
    "activations": "activations",
    "workspace": "temporary",
    "staging": "copy buffers",
}
"""Class of data -> its name in the text."""
WAITS = {
    "host_optimizer": "for the optimizer on the CPU",
    "device_optimizer": "for the optimizer on the GPU",
    "copies": "for copies",
    "other_gpus": "for the other GPUs",
    "nothing_else": "between operations and steps",
}
"""What compute waits for -> its name in the text."""
NOT_MEASURED = "some operations were not measured in this size"
"""What is said of a calibrated machine if the times of some ops are extrapolated."""
_MUCH_ATTENTION = 0.25
"""The least share of a step for which the text says how much of it is attention."""


def text(
    verdict: Verdict,
    width: int = 80,
    *,
    why: bool = False,
    commands: Sequence[tuple[list[str], str]] = (),
    about_machine: Sequence[str] = (),
) -> str:
    """Returns the report on one plan, wrapped at `width` columns.

    It is `answer_lines` and then `advice_lines`, which have the same arguments.
    """
    return "\n".join(
        [
            *answer_lines(verdict, width, about_machine=about_machine),
            *advice_lines(verdict, width, why=why, commands=commands),
        ]
    )


def answer_lines(verdict: Verdict, width: int, *, about_machine: Sequence[str] = ()) -> list[str]:
    """Returns the first lines of the report: whether the model fits, how fast it trains, and its
    memory.

    If the model fits, they need no result of other plans, which `explored` adds to a verdict.

    Args:
        verdict: The verdict to format.
        width: The maximum number of columns, which only a longer word exceeds.
        about_machine: Notes on the machine's measurements.
    """
    lines = [*heading(verdict, width), ""]
    if verdict.feasible:
        lines += _speed(verdict, width)
    lines += _time(verdict, width) + memory(verdict, width)
    if verdict.feasible and verdict.step_shares:
        lines += labelled("Step", shares(verdict), width)
    if verdict.feasible and verdict.network:
        lines += _network(verdict.network, verdict.step_seconds, width)
    for note in (*about_machine, *notes(verdict)):
        lines += labelled("Note", note, width)
    return lines


def advice_lines(
    verdict: Verdict,
    width: int,
    *,
    why: bool = False,
    commands: Sequence[tuple[list[str], str]] = (),
) -> list[str]:
    """Returns the lines of the report that follow `answer_lines`: what else would fit or be faster.

    Args:
        verdict: The verdict to format.
        width: The maximum number of columns, which only a longer word exceeds.
        why: Whether to add the reasons: placement, knobs, runner-up and bounds.
        commands: The suggested commands: the words of each, and a phrase on what it does.
    """
    more = labelled("Room", room(verdict), width) + _advice(verdict, width)
    lines = ["", *more] if more else []
    if verdict.multi_gpu:
        lines += ["", *_several(verdict, width)]
    if why:
        lines += ["", *reasons(verdict, width)]
    lines += _next(commands, width)
    if commands and not why:
        lines += labelled("", "--why adds what is kept where, the runner-up and the bounds", width)
    return lines


def _next(commands: Sequence[tuple[list[str], str]], width: int) -> list[str]:
    """Returns the lines of the suggested commands. A comment below each says what it does."""
    lines = []
    indent = " " * (layout.LABEL + 4)
    for words, effect in commands:
        lines += layout.command(words, width)
        lines += textwrap.wrap(
            f"# {effect}", width, initial_indent=indent, subsequent_indent=f"{indent}# "
        )
    return ["", "Next" + lines[0][4:], *lines[1:]] if lines else []


def heading(verdict: Verdict, width: int) -> list[str]:
    """Returns the answer, YES or NO, and for a NO its reason. If several GPUs were asked for, it is
    the answer for them, and a sentence with the one for a single GPU follows.
    """
    several = verdict.multi_gpu
    if several is None:
        return labelled("YES" if verdict.feasible else "NO", answer(verdict, where(verdict)), width)
    fits = several.feasible and not several.refused
    if fits:
        said = f"fits on {several.gpus} GPUs"
        speed = f": {layout.speed(several.tokens_per_second)} tokens/s"
    else:
        verb = "cannot be shared by" if several.refused else "does not fit on"
        said, speed = f"{verb} {several.gpus} GPUs", ""
        if not several.refused:
            speed = f": the nearest plan needs {_needs(verdict, several)}"
    hosts = f" of {several.hosts} hosts" if several.hosts > 1 else ""
    one = answer(verdict, where(verdict), subject="It")
    return labelled("YES" if fits else "NO", f"{_job(verdict)} {said}{hosts}{speed}. {one}", width)


def answer(verdict: Verdict, place: str, subject: str = "") -> str:
    """Returns a sentence that says whether the model fits on `place`, a machine with its memory,
    and if not, a second one that says what is lacking. The sentence begins with `subject`, or with
    the name of the model and what is done with it.
    """
    subject, work = subject or _job(verdict), verdict.workload
    if verdict.feasible:
        condition = f", if {verdict.fits_if}" if verdict.fits_if else ""
        return f"{subject} fits on {place}{condition}."
    rows = f"{work.batch:,} x {work.sequence:,} tokens a micro-batch"
    return f"{subject} does not fit on {place}. With {rows} it {_shortage(verdict)}."


def _job(verdict: Verdict) -> str:
    """Returns the name of the model and what is done with it, such as `Full fine-tuning of M`."""
    parameters = layout.count(verdict.parameters)
    active = (
        f", {layout.count(verdict.active_parameters)} active"
        if verdict.active_parameters != verdict.parameters
        else ""
    )
    work = verdict.workload
    optimizer = "" if work.optimizer == ADAMW else f" with optimizer {work.optimizer}"
    state = "" if work.state == EXACT else f" with {FORMATS[work.state].what} ({work.state})"
    joined = "and" if state else "with"
    stored = "" if work.gradients == "exact" else f" {joined} gradients stored in 8 bits"
    return f"Full fine-tuning of {verdict.model} ({parameters}{active}){optimizer}{state}{stored}"


def where(verdict: Verdict, assumed: str = "assumed free; give yours by --host-memory") -> str:
    """Returns the machine and its memory. The note `assumed` follows if its RAM is not known."""
    unnamed = verdict.machine.startswith("machine ")
    machine = verdict.machine if unnamed else f"one {verdict.machine}"
    if verdict.hosts > 1:
        machine = f"{_hosts(verdict.hosts, verdict.gpus)} of {verdict.machine}, each GPU"
    elif verdict.gpus > 1:
        machine = f"{verdict.gpus} GPUs of {verdict.machine}, each"
    if verdict.unified:
        return f"{machine} with {layout.size(verdict.device_limit_bytes)} of memory"
    return (
        f"{machine} with {layout.size(verdict.device_limit_bytes)} of VRAM and"
        f" {layout.size(verdict.host_limit_bytes)} of RAM"
        f"{f' ({assumed})' if verdict.host_memory_assumed else ''}"
    )


def _hosts(hosts: int, gpus: int) -> str:
    """Returns the hosts and the GPUs of each host, such as `2 hosts of 4 GPUs`."""
    return f"{hosts} hosts of {counted(gpus // hosts, 'GPU')}"


def _network(cost: NetworkCost, step_seconds: float, width: int) -> list[str]:
    """Returns the lines on what the network between hosts costs in a step of `step_seconds`."""
    share = cost.seconds / step_seconds
    longer = (
        f"makes the step {layout.seconds(cost.seconds)} longer ({share:.0%} of it)"
        if share >= 0.0005
        else "does not make the step longer"
    )
    return labelled(
        "Network",
        f"{longer} than a network of unlimited rate: each host receives"
        f" {cost.received_bytes / 1e9:,.1f} GB a step, at {cost.gb_per_s:g} GB/s (assumed)",
        width,
    )


def _enough_host_bytes(verdict: Verdict) -> int | None:
    """Returns the least host memory in bytes with which the model was found to fit, if any."""
    if verdict.unified:
        return None
    for entry in verdict.advice:
        if entry.fits and entry.options.keys() == {"host-memory"}:
            return parse_bytes(entry.options["host-memory"])
    return None


def _shortage(verdict: Verdict) -> str:
    """Returns the host memory with which the model fits, or else the memory that the plan lacks."""
    enough = _enough_host_bytes(verdict)
    if enough is not None:
        return f"needs {layout.size(enough)} of RAM"
    places = (
        [("memory", verdict.device_peak_bytes - verdict.device_limit_bytes)]
        if verdict.unified
        else [
            ("VRAM", verdict.device_peak_bytes - verdict.device_limit_bytes),
            ("RAM", verdict.host_peak_bytes - verdict.host_limit_bytes),
        ]
    )
    return "lacks " + " and ".join(
        f"{layout.size(size)} of {name}" for name, size in places if size > 0
    )


def _speed(verdict: Verdict, width: int) -> list[str]:
    """Returns the lines on the speed of one GPU."""
    work = verdict.workload
    certainty = "; ".join(filter(None, (spread(verdict), rates_source(verdict))))
    one = " on one GPU" if verdict.multi_gpu else ""
    speed = f"{layout.speed(verdict.tokens_per_second)} tokens/s{one} ({certainty})"
    lines = labelled("Speed", speed, width)
    step = f"{layout.seconds(verdict.step_seconds)} a step of {step_tokens(work)}"
    most = "fastest" if verdict.workload.token_piece else "largest"
    chosen = f", the {most} micro-batch up to 32 that fits" if verdict.batch_chosen else ""
    mfu = f", MFU {verdict.mfu:.0%}" if verdict.mfu is not None else ""
    return lines + labelled("", f"{step}{chosen}{mfu}", width)


def _time(verdict: Verdict, width: int) -> list[str]:
    """Returns the lines on time and energy if a number of tokens was given."""
    training, several = verdict.training, verdict.multi_gpu
    if training is None:
        return []
    spent = [end for end in (training.hours_low, training.hours_high) if end is not None]
    tokens = layout.count(training.tokens)
    energy = (
        f", {layout.rough(training.energy_kwh)} kWh of GPU energy"
        if training.energy_kwh is not None
        else ""
    )
    gpus = f" on {'one GPU' if several.refused else f'{several.gpus} GPUs'}" if several else ""
    took = layout.hours(training.hours, *spent)
    return labelled("Time", f"{tokens} tokens in {took}{gpus}{energy}", width)


def spread(verdict: Verdict) -> str:
    """Returns the range of the speed in tokens/s, or an empty string if there is none."""
    low, high = verdict.tokens_per_second_low, verdict.tokens_per_second_high
    ends = [layout.rough(end) for end in (low, high) if end is not None]
    # The ends of a narrow range may be equal in three digits.
    return f"{ends[0]} to {ends[1]}" if len(set(ends)) == 2 else ""


def step_tokens(work: Workload) -> str:
    """Returns the tokens of a step as micro-batches, sequences and tokens."""
    several = f"{work.accumulation} x " if work.accumulation > 1 else ""
    return f"{several}{work.batch:,} x {work.sequence:,} tokens"


def memory(verdict: Verdict, width: int = 80) -> list[str]:
    """Returns the memory of device and host: a bar each, and the bytes by class of data."""
    lines = []
    places = [("VRAM", "device", verdict.device_peak_bytes, verdict.device_limit_bytes)]
    if verdict.unified:
        places = [("Memory", *places[0][1:])]
    else:
        places.append(("RAM", "host", verdict.host_peak_bytes, verdict.host_limit_bytes))
    used = [layout.part_of(peak, limit) for _, _, peak, limit in places]
    limits = [layout.fixed(limit) for *_, limit in places]
    for index, (label, place, peak, limit) in enumerate(places):
        line = (
            f"{label:<{layout.LABEL}}{used[index]:>{max(map(len, used))}} of"
            f" {limits[index]:>{max(map(len, limits))}}  "
        )
        lines.append(line + layout.bar(peak, limit, min(layout.BAR, width - len(line))))
        if peak > limit:
            lines += layout.flowed([f"{layout.size(peak - limit)} too little"], width)
        _, factor = layout.unit_of(peak)
        shown = [
            f"{CLASS_NAMES[name]} {size / factor:,.1f}"
            for name, size in verdict.classes[place].items()
            if size >= 0.05 * factor
        ]
        lines += layout.flowed(shown, width)
    return lines


def shares(verdict: Verdict) -> str:
    """Returns the share of a step in which the GPU computes, and what it waits for in the rest."""
    waits = [
        f"{WAITS[name]} {share:.0%}"
        for name, share in sorted(verdict.step_shares.items(), key=lambda item: -item[1])
        if name in WAITS and share >= 0.005
    ]
    resident = (
        ""
        if verdict.streams or verdict.unified
        else "; everything stays on the GPU, nothing is copied"
    )
    waiting = f", waits {', '.join(waits)}" if waits else ""
    attention = verdict.attention_seconds / verdict.step_seconds
    split = f" (attention {attention:.0%})" if attention >= _MUCH_ATTENTION else ""
    return f"GPU computes {verdict.step_shares['compute']:.0%}{split}{waiting}{resident}"


def notes(verdict: Verdict) -> list[str]:
    """Returns further facts about the verdict, one sentence each."""
    longest, sequence = verdict.model_longest_row, verdict.workload.sequence
    sentences = []
    if not verdict.feasible:
        enough = _enough_host_bytes(verdict)
        other = (
            f"; another plan fits with {layout.size(enough)} of RAM"
            if enough is not None and enough < verdict.host_peak_bytes
            else ""
        )
        sentences.append(f"the memory is that of the plan that comes nearest to fitting{other}")
    if longest is not None and sequence > longest:
        sentences.append(
            f"sequences of {sequence:,} tokens are longer than the model's own limit of {longest:,}"
            " (max_position_embeddings)"
        )
    if verdict.eager:
        sentences.append(verdict.eager)
    if verdict.documents:
        sentences.append(f"documents: {verdict.documents}")
    if verdict.fp8:
        sentences.append(verdict.fp8)
    if piece := verdict.workload.piece:
        sentences.append(f"layers compute {piece:,} tokens at a time (--token-piece)")
    if (groups := verdict.workload.groups) > 1:
        sentences.append(f"attention computes one of {groups} groups of heads at a time")
    if chosen := kernel(verdict):
        sentences.append(chosen)
    if verdict.calibrated and verdict.extrapolated:
        sentences.append(f"{NOT_MEASURED}; --why names them")
    if not verdict.cuda:
        sentences.append(without_cuda(verdict))
    return sentences


def kernel(verdict: Verdict) -> str:
    """Returns the attention kernel that the planner chose and its gain, in words, or an empty
    string if it chose none.
    """
    if verdict.kernel_gain is None:
        return ""
    name = verdict.workload.attention
    other = "" if is_deterministic(name) else "; --deterministic needs --attention flash"
    return (
        f"attention kernel {name} was chosen: layers compute {verdict.kernel_gain:.0%} faster than"
        f" predicted without --attention{other}"
    )


def room(verdict: Verdict) -> str:
    """Returns the longest context and the largest micro-batch that fit, or an empty string if they
    were not computed.
    """
    context, batch = verdict.longest_context, verdict.largest_batch
    if context is None:
        return ""
    if not context:
        return "no micro-batch fits, not even the smallest"
    longest, pieces = verdict.model_longest_row, verdict.longest_context_in_pieces
    beyond = longest is not None and max(context, pieces or 0) > longest
    own = f" (the model's own limit is {longest:,})" if beyond else ""
    if pieces:
        own = f", {pieces:,} with --token-piece {LEAST_PIECE}{own}"
    several = "sequence" if batch == 1 else "sequences"
    rows = f", or {batch:,} {several} of {verdict.workload.sequence:,}" if batch else ""
    return f"a context of up to {context:,} tokens{own}{rows}"


def helpful(verdict: Verdict) -> list[Suggestion]:
    """Returns the changes with which the model fits or, if there are none, the changes that help
    but do not suffice. For a model that fits, other state formats are left out.
    """
    shown = [entry for entry in verdict.advice if not (entry.compressed and verdict.feasible)]
    return [entry for entry in shown if entry.fits] or shown


def _advice(verdict: Verdict, width: int) -> list[str]:
    """Returns the lines on changes that would help."""
    shown = helpful(verdict)
    if not shown:
        return []
    table = layout.rows([suggestion(entry) for entry in shown], width)
    # Several GPUs may refuse a change, or gain nothing by it.
    place = " on one GPU" if verdict.multi_gpu else ""
    if verdict.feasible and place:
        return [f"Faster{place}", *table]
    if verdict.feasible:
        return ["Faster" + table[0][6:], *table[1:]]
    note = (
        labelled(
            "",
            f"speeds are those of {step_tokens(verdict.workload)}; without --batch, these"
            " changes choose a larger micro-batch if one fits, and are faster",
            width,
        )
        if verdict.batch_chosen and shown[0].fits
        else []
    )
    would = "What would do" if shown[0].fits else "What would help"
    return [would + place, *table, *note]


def suggestion(entry: Suggestion) -> tuple[str, ...]:
    """Returns the row of one change: its name, its gain, its speed, and what it costs."""
    name = entry.model or as_options(entry.options)
    gain = f"{entry.gain:+.0%}" if entry.gain is not None else ""
    if not entry.fits:
        return name, "", "", f"not enough: {layout.size(entry.bytes_missing)} still missing"
    speed = (
        f"{layout.speed(entry.tokens_per_second)} tokens/s"
        if entry.tokens_per_second is not None
        else ""
    )
    return name, gain, speed, entry.note


def remedy(verdict: Verdict) -> str:
    """Returns the first change that makes the model fit, as a phrase for an error.

    It is the first change under `What would do`. If there is none, returns `verdict.reason`.
    """
    for entry in verdict.advice:
        if entry.fits:
            name, _, speed, note = suggestion(entry)
            details = ", ".join(part for part in (note, speed) if part)
            return f"{name} would fit" + (f" ({details})" if details else "")
    return verdict.reason


def _several(verdict: Verdict, width: int) -> list[str]:
    """Returns the lines on several GPUs. They have a speed only if the GPUs can train the model."""
    several = verdict.multi_gpu
    assert several is not None
    label = f"{several.gpus} GPUs"
    if several.refused:
        return labelled(label, f"cannot train this: {several.refused}", width)
    hosts = f"{_hosts(several.hosts, several.gpus)}: " if several.hosts > 1 else ""
    own = _own_options(verdict.workload, several)
    if not several.feasible:
        needs = f"the nearest plan needs {_needs(verdict, several)}"
        return labelled(label, f"{hosts}DOES NOT FIT: {needs}{own}", width)
    ratio = f"{several.speedup:.1f} times one GPU, " if verdict.feasible else ""
    lines = labelled(
        label,
        f"{hosts}{layout.speed(several.tokens_per_second)} tokens/s, {ratio}"
        f"{layout.seconds(several.step_seconds)} a step{own} ({several.note}; links at"
        f" {several.gb_per_s:.1f} GB/s each, {several.gb_per_s_both:.1f} in both directions at"
        " once)",
        width,
    )
    if several.network:
        lines += _network(several.network, several.step_seconds, width)
    return lines


def _needs(verdict: Verdict, several: MultiGpu) -> str:
    """Returns the memory that several GPUs need where they do not have it, with what they have."""
    places = [
        (
            several.host_peak_bytes,
            several.host_limit_bytes,
            "RAM" if several.hosts == 1 else "RAM of each host",
        ),
        (several.device_peak_bytes or 0, verdict.device_limit_bytes, "VRAM of each GPU"),
    ]
    return " and ".join(
        f"{layout.size(need)} of {name} ({layout.size(limit)} given)"
        for need, limit, name in places
        if need > limit
    )


def _own_options(one: Workload, all_gpus: MultiGpu) -> str:
    """Returns the options that were chosen for several GPUs and differ from those for one GPU, in
    words, or an empty string.
    """
    several = all_gpus.workload
    if several is None:
        return ""
    options = []
    if several.batch != one.batch:
        options.append(f"--batch {several.batch}")
    if (accumulation := several.accumulation // all_gpus.gpus) != one.accumulation:
        options.append(f"--accumulation {accumulation}")
    if several.state != one.state:
        options.append(f"--state {several.state}")
    if several.token_piece != one.token_piece:
        piece = several.token_piece
        options.append(f"--token-piece {piece}" if piece else "no --token-piece")
    return f" with {' and '.join(options)}" if options else ""


def limits(verdict: Verdict) -> str:
    """Returns the memory limits and the memory that the plan needs, as one phrase for an error."""
    return (
        f"{format_bytes(verdict.device_limit_bytes)} of device memory (the nearest plan needs"
        f" {format_bytes(verdict.device_peak_bytes)}) and {format_bytes(verdict.host_limit_bytes)}"
        f" of host memory (it needs {format_bytes(verdict.host_peak_bytes)})"
    )
