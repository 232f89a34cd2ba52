"""A process that imports everything once and forks a `megatrain` command per JSON line.

The commands are real processes but start fast. A line is {"words": [...], "folder": ...,
"log": ..., "at": [[FUNCTION, CALL, SIGNAL], ...], "ignores": [SIGNAL, ...]}. The answer is the
process id of the command. A line with this number waits for that command, and its answer is the
exit status as in `subprocess`.

`at` has signals that the command sends to itself, each right before a call of FUNCTION. FUNCTION is
given as MODULE:NAME, and CALL is the number of the call, counted from 1.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from typing import Any

import tokenizers  # noqa: F401  # commands import it when they need it
import torch
import transformers.conversion_mapping
import transformers.convert_slow_tokenizer
import transformers.models.auto.tokenization_auto

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli.training import adaptation, progress, step_comparison  # noqa: F401
from megatrain.experiments.run_report import compared_run, pictures  # noqa: F401
from megatrain.runtime.files.checkpoint_names import CheckpointNames
from megatrain.runtime.layers.meta_model import meta_model
from megatrain.runtime.training import exporting, trainer  # noqa: F401
from megatrain.simulator.engine import discrete_event as engine  # noqa: F401
from megatrain.simulator.verdict import verdict  # noqa: F401


def command(
    words: list[str], folder: str, log: str, at: list[tuple[str, int, str]], ignores: list[str]
) -> None:
    """Runs the command in the forked process and ends that process."""
    status = 70
    try:
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in ignores:
            signal.signal(signal.Signals[name], signal.SIG_IGN)
        for each in at:
            _signal_at(*each)
        status = cli.main(words)
        sys.stdout.flush()
    except BaseException as error:
        sys.stderr.write(f"not caught: {type(error).__name__}: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(status)


def _signal_at(function: str, wanted: int, name: str) -> None:
    module_name, _, path = function.partition(":")
    *owners, attribute = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for each in owners:
        owner = getattr(owner, each)
    real, calls = getattr(owner, attribute), 0

    def watched(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == wanted:
            os.kill(os.getpid(), signal.Signals[name])
        return real(*args, **named)

    setattr(owner, attribute, watched)


def _say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def _warm_up() -> None:
    """Loads a model once, so commands need not, and switches off the picture of the loss.

    Loading fills tables of PyTorch and transformers. No thread may start here, because a process
    with threads cannot be forked safely.
    """
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    meta_model(config, torch.float32, torch.device("cpu"))
    CheckpointNames(config)
    transformers.conversion_mapping.get_checkpoint_conversion_mapping("llama")
    pictures.draw_loss = lambda *_: None


def main() -> None:
    """Starts commands until standard input ends."""
    torch.set_num_threads(1)
    _warm_up()
    gc.freeze()  # otherwise a collection in a child copies the memory of all imported modules
    _say("ready")
    for line in sys.stdin:
        given = json.loads(line)
        if isinstance(given, int):
            _say(os.waitstatus_to_exitcode(os.waitpid(given, 0)[1]))
        else:
            child = os.fork()
            if child == 0:
                command(**given)
            _say(child)


if __name__ == "__main__":
    main()
