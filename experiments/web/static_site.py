"""The page as a folder of files, with answers computed in advance for a grid of questions."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatrain.experiments.web.files import library_data, page_files
from megatrain.experiments.web.question import Question
from megatrain.simulator.base.atomic_files import AtomicWrite
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.names import meant, suggestion
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.hardware import machine as machines
from megatrain.simulator.model.specs import library

BATCHES, SEQUENCES = (1, 8), (1024, 4096)
"""The grid: sequences of a micro-batch, and tokens of a sequence."""
_NO_INTERRUPT = (signal.SIGINT, signal.SIG_IGN)
"""Workers ignore Ctrl-C, which reaches them too. The process that started them handles it."""


def chosen(models: list[str] | None, hardware: list[str] | None) -> tuple[list[str], list[str]]:
    """Returns the library's names of models and machines, for names in any spelling that `meant`
    finds.

    None means all. Raises UserError for a name that the library does not have.
    """
    return (
        _named("--models", models, library()),
        _named("--machines", hardware, machines.library()),
    )


def write_site(folder: Path, models: list[str], hardware: list[str]) -> str:
    """Writes the page and its answers to the new folder `folder`.

    The folder appears only when it is complete. The progress is shown on the terminal. Returns the
    number of answers and the size of the folder, as text. Raises UserError if the folder cannot be
    written.
    """
    count = 0
    with AtomicWrite(folder, folder=True) as aside:
        for name, text in page_files("stored.js").items():
            (aside / name).write_text(text, encoding="utf-8")
        grid = {"batch": BATCHES, "seq": SEQUENCES}
        _write(aside, "library", {**library_data(models, hardware), "grid": grid})
        with _progress() as progress:
            task = progress.add_task("models x machines", total=len(models) * len(hardware))
            for name, answers in _computed(itertools.product(models, hardware)):
                _write(aside, name, answers)
                count += len(answers)
                progress.advance(task)
        size = sum(file.stat().st_size for file in aside.rglob("*") if file.is_file())
        for part in (aside, aside / "data"):
            part.chmod(0o755)  # only the owner can read a temporary folder
        os.rename(aside, folder)
    return f"{count:,} answers in {format_bytes(size)}"


def key(batch: int | str, sequence: int | str) -> str:
    """Returns the name of an answer in the file of its model and machine."""
    return f"{batch}x{sequence}"


def _named(option: str, names: list[str] | None, known: Mapping[str, Path]) -> list[str]:
    found = []
    for name in known if names is None else names:
        known_name = meant(name, known)
        if known_name is None:
            raise UserError(
                option,
                found=name,
                allowed="names of the library (`megatrain list models`, `megatrain list hardware`)",
                fix=suggestion(name, known, "check the name"),
            )
        found.append(known_name)
    return list(dict.fromkeys(found))


def _computed(pairs: Iterable[tuple[str, str]]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Computes the answers of pairs of a model and a machine on all cores. Yields the name of a
    pair's file and its answers when they are ready.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatrain.experiments.web.answer"])
    others = set(multiprocessing.active_children())
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, context, signal.signal, _NO_INTERRUPT) as pool:
        waiting = [pool.submit(_answers, *pair, BATCHES, SEQUENCES) for pair in pairs]
        try:
            for done in as_completed(waiting):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()  # its search may take another minute
            raise


def _answers(
    model: str, machine: str, batches: Sequence[int], sequences: Sequence[int]
) -> tuple[str, dict[str, Any]]:
    """Returns the name of the file of a model and a machine, and its answers by `key`.

    If the command refuses a question, its answer is the message, as `error`.
    """
    from megatrain.experiments.web.answer import answer, answer_by_policy

    found: dict[str, Any] = {}
    for batch, sequence in itertools.product(batches, sequences):
        question = Question(model=model, hardware=machine, batch=str(batch), seq=str(sequence))
        try:
            parts: dict[str, Any] = dict(answer(question))
            (_, policies), *_ = answer_by_policy(question)
            entry = parts["verdict"] | parts["advice"] | {"policies": policies}
        except UserError as error:
            entry = {"error": str(error)}
        found[key(batch, sequence)] = entry
    return f"{model}--{machine}", found


def _write(folder: Path, name: str, value: dict[str, Any]) -> None:
    """Writes a value as JSON in a script, because a page can load a script without a server."""
    (folder / "data").mkdir(exist_ok=True)
    text = f'arrived("{name}", {msgspec.json.encode(value).decode()});\n'
    (folder / "data" / f"{name}.js").write_text(text, encoding="utf-8")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )
