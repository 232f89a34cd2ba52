"""Lets the model that a training exported answer the questions of `--ask`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatrain.experiments.cli.training.generation import generation_device, show, weight_bytes
from megatrain.runtime.files.exported_models import exported_models
from megatrain.runtime.training.answers import Answer, add_answer
from megatrain.simulator.base.errors import DoesNotFit, UserError

_MOST_TOKENS = 256
"""The maximum number of tokens in an answer."""


def answer_questions(
    run: Path, questions: Sequence[str], args: argparse.Namespace, *, seed: int
) -> None:
    """Prints the answer of the run's newest model to each question, and stores it in the run.

    Each token is the most likely one, and each question begins a new conversation. If the model
    cannot answer, one line says why and which command asks later. The run does not fail.

    Args:
        run: the folder of a finished run.
        questions: the questions.
        args: the options of the command, which select the device.
        seed: the seed of the random numbers.
    """
    later = f"ask later with: megatrain chat {shlex.quote(str(run))}"
    try:
        _answer(run, questions, args, seed)
    except DoesNotFit as error:
        print(f"no answers: {error.found} do not fit into {error.allowed}; {later}")
    except KeyboardInterrupt as error:  # also SIGTERM and SIGHUP
        error.add_note(f"the run is finished; {later}")
        raise
    except Exception as error:  # the run has succeeded, even if transformers fails here
        first = (str(error).splitlines() or [""])[0] or type(error).__name__
        print(f"no more answers: {first}; {later}")


def _answer(run: Path, questions: Sequence[str], args: argparse.Namespace, seed: int) -> None:
    model = exported_models(run)[-1]
    folder = run / model.folder
    device = generation_device(args, folder, weight_bytes(folder))

    from megatrain.runtime.training.conversation import ChatSession, Sampling

    conversation = ChatSession(folder, device, Sampling(_MOST_TOKENS, 0.0, seed))
    if not conversation.templated:
        print("no chat template: the model continues the text")
    for question in questions:
        parts: list[str] = []
        print(f"\n> {question}", flush=True)
        try:
            conversation.answer(question, lambda text: _show(text, parts))  # noqa: B023
        except UserError as error:  # this question may be too long, the next may not
            print(f"no answer: {error}")
            continue
        finally:
            conversation.forget()
        print()
        answer = "".join(parts)
        add_answer(
            run, Answer(step=model.step, model=model.folder, question=question, answer=answer)
        )


def _show(text: str, parts: list[str]) -> None:
    """Prints `text`, and appends it to `parts`."""
    parts.append(text)
    show(text)
