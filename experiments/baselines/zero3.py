"""DeepSpeed ZeRO-3 with parameters and optimizer in host memory: its CPU Adam, activations recomputed, gradients clipped.

DeepSpeed compiles its CPU Adam during the first step, so it wants a C++ compiler and ninja.
"""

from __future__ import annotations

from typing import Any

import torch

from megatrain.experiments.benchmarks.steps import MAX_NORM, RATE, Parts, Reading, Step, alone_in_group, random_tokens
from megatrain.runtime.hyperparameters import AdamW
from megatrain.runtime.layers.templates import config_of
from megatrain.simulator.plan import Plan
from megatrain.simulator.workload import Workload

NEEDS = ("deepspeed",)
"""packages that do not come with megatrain"""
DEVICES = ("cuda",)


def settings(workload: Workload) -> dict[str, Any]:
    """DeepSpeed's configuration, with our AdamW; sizes in elements. Those of buckets and prefetching take 7B at 32 x 1024 tokens through an H200."""
    own, host = AdamW(), {"device": "cpu", "pin_memory": True}
    optimizer = {"lr": RATE, "betas": list(own.betas), "eps": own.epsilon, "weight_decay": own.weight_decay}
    zero = {
        "stage": 3, "offload_param": host, "offload_optimizer": host, "overlap_comm": True, "contiguous_gradients": True,
        "reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 500_000_000, "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 2_000_000_000, "stage3_max_reuse_distance": 2_000_000_000,
    }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": workload.batch, "gradient_accumulation_steps": workload.accumulation, "bf16": {"enabled": workload.dtype == "bf16"},
        "gradient_clipping": MAX_NORM if workload.clipping == "global" else 0.0, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": optimizer}, "zero_optimization": zero,
    }  # fmt: skip


def prepare(plan: Plan, device: torch.device) -> tuple[Step, str]:
    """A step on random tokens from random weights, and what is to be known of it."""
    alone_in_group()
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    work, chosen = plan.workload, settings(plan.workload)
    deepspeed.init_distributed("nccl")
    partitioned = HfDeepSpeedConfig(chosen)  # while it lives, transformers makes each tensor in its place on the host
    model = AutoModelForCausalLM.from_config(config_of(plan.model, plan.workload), dtype=torch.bfloat16 if work.dtype == "bf16" else torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(model=model, config=chosen, model_parameters=model.parameters())
    del partitioned

    def step(number: int) -> Reading:
        micro_batches = [tokens[0].to(device) for tokens in random_tokens(plan.model.vocabulary, work, number)]
        parts, losses = Parts(device), []
        for ids in micro_batches:
            with parts.time("forward"):
                loss = engine(input_ids=ids, labels=ids).loss
            losses.append(loss.detach())
            with parts.time("backward"):
                engine.backward(loss)
            with parts.time("optimizer"):
                engine.step()  # updates after the last micro-batch only
        norm = engine.get_global_grad_norm() if work.clipping == "global" else None
        mean = float(torch.stack(losses).double().mean())
        return Reading(seconds=sum(parts.seconds.values()), loss=mean, gradient_norm=None if norm is None else float(norm), parts=parts.seconds)

    return step, f"DeepSpeed {deepspeed.__version__}, eager layers, recompute" + ("" if work.clipping == "global" else ", no clipping")
