"""A process that imports torch once, then forks a training run for every JSON line that it reads.

The tests kill many runs, and importing torch for each would be slow. Each line holds the options of
`train`, and the answer is the run's process id. An empty line waits for that run, and the answer is
its exit status, as in `subprocess`. A run logs what it does, so a test knows where it died.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "shared")]

import msgspec  # noqa: E402
import torch  # noqa: E402
import xxhash  # noqa: E402
from conftest import small_plan  # noqa: E402

from megatrain.runtime.batch import Batch  # noqa: E402
from megatrain.runtime.checkpoint import checkpoint  # noqa: E402
from megatrain.runtime.checkpoint.folder import Checkpoints  # noqa: E402
from megatrain.runtime.checkpoint.manifest import RunState  # noqa: E402
from megatrain.runtime.execution.executor import Executor  # noqa: E402
from megatrain.runtime.files.model_files import random_weights  # noqa: E402
from megatrain.runtime.layers.functional_layers import config_of  # noqa: E402
from megatrain.runtime.optimizer.adamw import AdamW  # noqa: E402
from megatrain.runtime.training.interruption import Interruption  # noqa: E402
from megatrain.simulator.base.errors import Interrupted  # noqa: E402
from megatrain.simulator.policies import lower  # noqa: E402
from megatrain.simulator.schedule.plan import Plan  # noqa: E402

LANES = ("compute", "update", "h2d", "d2h", "cpu")


def train(
    folder: str,
    log: str,
    steps: int,
    every: int,
    policy: str,
    signals: dict[str, int] | None = None,
) -> None:
    """Resumes from `folder`, trains up to step `steps`, and saves every `every` steps.

    On a signal, the run saves and raises Interrupted. `signals` maps the beginning of a log line to
    a signal, which the run sends to itself after the first such line.
    """
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    pending = dict(signals or {})

    def say(*words: object) -> None:
        line = " ".join(map(str, words))
        os.write(handle, (line + "\n").encode())
        for beginning in [each for each in pending if line.startswith(each)]:
            os.kill(os.getpid(), pending.pop(beginning))

    write = checkpoint.write_tensors

    def watched(path: Path, tensors: dict[str, Any]) -> tuple[int, str]:
        say("writing", path.name)
        return write(path, tensors)

    checkpoint.write_tensors = watched
    checkpoints = Checkpoints(Path(folder), keep_last=2)
    with Interruption(lambda: "") as interruption, _executor(policy) as executor:
        state = executor.state
        found = checkpoints.restore(executor, {})
        if found is None:
            state.load(random_weights(0))
        done = 0 if found is None else found.step
        say("resumed", done)
        for number in range(done + 1, steps + 1):
            say("training", number)
            result = executor.step(batches(executor.plan, number), rate=1e-2, number=number)
            say("step", number, result.loss.hex(), float(result.gradient_norm or 0).hex())
            if number % every == 0 or interruption or number == steps:
                say("saving", number)
                checkpoints.save(executor, RunState(step=number, loss=result.loss))
                say("saved", number)
            if interruption:
                raise interruption.error()
        digest = xxhash.xxh3_128()
        for tensor in state.tensors().values():
            digest.update(tensor.clone().view(-1).view(torch.uint8).numpy())
        say("finished", digest.hexdigest())


def _executor(policy: str) -> Executor:
    plan: Plan = small_plan(policy)
    plan = msgspec.structs.replace(plan, digest=lower(plan).digest)
    return Executor(
        plan,
        config_of(plan.model),
        AdamW(max_norm=0.05),
        torch.device("cpu"),
        threads=dict.fromkeys(LANES, 1),
    )


def batches(plan: Plan, number: int) -> list[Batch]:
    """Returns the batches of a step, which depend only on its number, like those of a corpus."""
    work, generator = plan.workload, torch.Generator().manual_seed(number)
    return [
        Batch(
            *torch.randint(
                plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator
            )
        )
        for _ in range(work.accumulation)
    ]


def _child(options: dict[str, Any]) -> int:
    try:
        train(**options)
    except Interrupted as error:
        return error.status
    except BaseException as error:
        with open(options["log"], "a") as log:
            log.write(f"failed {type(error).__name__}: {error}\n")
        return 1
    return 0


def main() -> None:
    def answer(word: object) -> None:
        sys.stdout.write(f"{word}\n")
        sys.stdout.flush()

    torch.set_num_threads(1)
    _executor("overlapped").close()  # Imports all modules. No thread is left, so forking is safe.
    gc.freeze()  # otherwise a collection in a child copies the memory of all imported modules
    answer("ready")
    process = 0
    for line in sys.stdin:
        if line.strip():
            process = os.fork()
            if not process:
                os._exit(_child(json.loads(line)))
            answer(process)
        else:
            answer(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


if __name__ == "__main__":
    main()
