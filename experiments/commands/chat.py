"""Chat with a trained model.

The model is loaded with transformers, on the GPU if it fits there, otherwise on the CPU. Text goes
through the tokenizer's chat template. Without one, the model continues the text. Ctrl-C ends an
answer. `/new` begins a new conversation, and `/quit` or another Ctrl-C ends the command. Standard
input that is not a terminal is one prompt.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.experiments.cli import options
from megatrain.simulator.base.errors import Interrupted, UserError

if TYPE_CHECKING:
    from megatrain.runtime.training.conversation import ChatSession


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=Path,
        metavar="RUN|FOLDER",
        help="a folder written by `megatrain train` or `megatrain export`, or another Hugging Face"
        " folder",
    )
    parser.add_argument(
        "--prompt",
        type=options.text("--prompt", "Hello"),
        metavar="TEXT",
        help="print one answer to TEXT, and end",
    )
    parser.add_argument(
        "--max-tokens",
        type=options.whole("--max-tokens"),
        default=512,
        metavar="N",
        help="maximum number of tokens in an answer (default 512)",
    )
    parser.add_argument(
        "--temperature",
        type=options.real("--temperature"),
        default=0.7,
        metavar="T",
        help="randomness of an answer; 0: always the most likely token (default 0.7)",
    )
    parser.add_argument(
        "--seed",
        type=options.whole("--seed", 0, 2**32 - 1),
        default=0,
        metavar="N",
        help="seed of the random numbers (default 0)",
    )
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    from megatrain.experiments.cli.training import generation

    # These checks take place before PyTorch is loaded.
    folder = _model_folder(args.model)
    needed = generation.weight_bytes(folder)
    prompt = args.prompt
    options.refuse_missing_gpu(args)
    if args.device == "cpu":
        generation.refuse_larger_than_host(folder, needed)
    if prompt is None and not sys.stdin.isatty():
        prompt = options.readable("standard input", sys.stdin.read).strip()
        if not prompt:
            raise UserError(
                "standard input",
                found="no text",
                allowed="a prompt",
                fix="pass one with --prompt, or type it in a terminal",
            )
    device = generation.generation_device(args, folder, needed)

    from megatrain.runtime.training.conversation import ChatSession, Sampling

    sampling = Sampling(args.max_tokens, args.temperature, args.seed)
    conversation = ChatSession(folder, device, sampling)
    if not conversation.templated:
        print("no chat template: the model continues the text", file=sys.stderr)
    if prompt is None:
        return _talk(conversation)
    conversation.answer(prompt, generation.show)
    print()
    return 0


def _talk(conversation: ChatSession) -> int:
    """Answers one line after another, until the user ends it."""
    import readline  # noqa: F401  input() then lets a line be edited

    from megatrain.experiments.cli.training.generation import show

    print("/quit ends, /new begins a new conversation, Ctrl-C ends an answer")
    while True:
        try:
            line = options.readable("the prompt", lambda: input("> ")).strip()
        except EOFError:
            print()
            return 0
        except UserError as error:
            print(error)
            continue
        if line == "/quit":
            return 0
        if line == "/new":
            conversation.forget()
        elif line:
            try:
                conversation.answer(line, show)
            except Interrupted:  # SIGTERM or SIGHUP
                raise
            except KeyboardInterrupt:
                print(" (ended)", end="")
            except UserError as error:
                print(f"{error}, with /new", end="")
            print()


def _model_folder(path: Path) -> Path:
    """Returns the folder of the newest model of a run, or `path` if it is a model's folder itself.

    Raises UserError if there is no model.
    """
    from megatrain.runtime.files.exported_models import newest_model
    from megatrain.runtime.training.stopped_run import command_to_continue, last_checkpoint

    if (path / "config.toml").is_file():
        if model := newest_model(path):
            return model
        saved = last_checkpoint(path)
        raise UserError(
            str(path),
            found="no trained model",
            allowed="a run with the folder model/, or a Hugging Face model folder",
            fix=f"megatrain export {shlex.quote(str(path))} --out MODEL, then megatrain chat MODEL"
            if saved
            else command_to_continue(path),
        )
    if not (path / "config.json").is_file():
        raise UserError(
            str(path),
            found="no config.json"
            if path.is_dir()
            else "a file"
            if path.exists()
            else "no such folder",
            allowed="a folder that `megatrain train` or `megatrain export` wrote, or another"
            " Hugging Face model folder",
            fix="check the path",
        )
    return path
