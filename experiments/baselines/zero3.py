"""DeepSpeed ZeRO-3 with parameters and optimizer state in host memory, its CPU Adam, recomputed
activations and clipped gradients.

DeepSpeed compiles its CPU Adam during the first step, which needs a C++ compiler and ninja.
"""

from __future__ import annotations

from typing import Any

import torch

from megatrain.experiments.benchmarks.steps import (
    MAX_NORM,
    RATE,
    Parts,
    Reading,
    WorkStep,
    in_group,
    random_tokens,
)
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.supported import refuse_unsupported
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Plan

NEEDS = ("deepspeed",)
"""Packages that are not installed with megatrain."""
DEVICES = ("cuda",)


def settings(workload: Workload) -> dict[str, Any]:
    """Returns DeepSpeed's configuration, with our AdamW. Sizes are in elements. The sizes of
    buckets and prefetching were chosen for 7B with 32 x 1024 tokens on an H200.
    """
    own, host = AdamW(), {"device": "cpu", "pin_memory": True}
    optimizer = {
        "lr": RATE,
        "betas": list(own.betas),
        "eps": own.epsilon,
        "weight_decay": own.weight_decay,
    }
    zero = {
        "stage": 3,
        "offload_param": host,
        "offload_optimizer": host,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500_000_000,
        "stage3_prefetch_bucket_size": 500_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 2_000_000_000,
        "stage3_max_reuse_distance": 2_000_000_000,
    }
    return {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": workload.accumulation,
        "bf16": {"enabled": workload.dtype == "bf16"},
        "gradient_clipping": MAX_NORM if workload.clipping == "global" else 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": zero,
    }


def prepare(plan: Plan, device: torch.device) -> tuple[WorkStep, str]:
    """Returns a step on random tokens from random weights, and notes on the system. A step can have
    another batch and sequence than `plan`.
    """
    in_group()
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    work, chosen = plan.workload, settings(plan.workload)
    refuse_unsupported(plan.model, work)
    deepspeed.init_distributed("nccl")
    # While this object exists, transformers creates each tensor directly in partitioned host
    # memory.
    partitioned = HfDeepSpeedConfig(chosen)
    model = AutoModelForCausalLM.from_config(
        config_of(plan.model), dtype=torch.bfloat16 if work.dtype == "bf16" else torch.float32
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(
        model=model, config=chosen, model_parameters=model.parameters()
    )
    del partitioned

    def step(number: int, work: Workload) -> Reading:
        micro_batches = [
            tokens[0].to(device) for tokens in random_tokens(plan.model.vocabulary, work, number)
        ]
        parts, losses = Parts(device), []
        for ids in micro_batches:
            with parts.time("forward"):
                loss = engine(input_ids=ids, labels=ids).loss
            losses.append(loss.detach())
            with parts.time("backward"):
                engine.backward(loss)
            with parts.time("optimizer"):
                engine.step()  # updates only after the last micro-batch
        norm = engine.get_global_grad_norm() if work.clipping == "global" else None
        mean = float(torch.stack(losses).double().mean())
        return Reading(
            seconds=sum(parts.seconds.values()),
            loss=mean,
            gradient_norm=None if norm is None else float(norm),
            parts=parts.seconds,
        )

    return step, f"DeepSpeed {deepspeed.__version__}, eager layers, recompute" + (
        "" if work.clipping == "global" else ", no clipping"
    )
