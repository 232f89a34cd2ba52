"""How attention separates documents and windows: by masks, or by lengths that a kernel receives."""

from __future__ import annotations

from typing import Literal

from megatrain.simulator.model.families import (
    ALWAYS_MASKED,
    CANNOT_SEPARATE_DOCUMENTS,
    UNFUSED_ATTENTION,
    WIDE_HEADS,
    Kept,
)
from megatrain.simulator.model.layer import DTYPE_BYTES, LayerSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload


def documents_obstacle(model: ModelSpec, sequence: int) -> str | None:
    """Returns why attention cannot separate the documents of a row of `sequence` tokens, or
    None if it can.
    """
    if model.family in CANNOT_SEPARATE_DOCUMENTS:
        return f"{model.family}, {CANNOT_SEPARATE_DOCUMENTS[model.family]}"
    first = model.architecture.scaled_from
    if first is not None and sequence >= first:
        return (
            f"{model.family}, which scales queries by their place in a row of {first} tokens or"
            " more"
        )
    return None


def document_attention(model: ModelSpec, workload: Workload) -> Literal["lengths", "mask"]:
    """Returns how attention on a GPU separates the documents of a row: `lengths` if a fused
    kernel receives their lengths, `mask` if the scores are masked. A flash kernel that computes
    scores with sinks receives lengths also for rows of one document.
    """
    unfused = model.family in (*UNFUSED_ATTENTION, *WIDE_HEADS)
    unfused = unfused and not model.fuses_scores(workload)
    return "mask" if workload.dtype == "fp32" or unfused else "lengths"


def document_tokens(model: ModelSpec, workload: Workload) -> int | None:
    """Returns the length of documents in tokens that the time of attention depends on.

    Returns None if it does not depend on it: rows are one document, or the kernel does not receive
    the lengths of documents and computes all pairs of a row.
    """
    length = workload.document_length
    if not workload.documents or length is None or length >= workload.sequence:
        return None
    return length if document_attention(model, workload) == "lengths" else None


def mask_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the bytes of attention masks on the device. Documents need a mask, unless the
    kernel receives their lengths. transformers also makes a mask for a window that is not
    longer than a sequence, and for written-out scores. Linear attention has no mask, and
    neither has the flash kernel for scores with sinks in bf16 (`document_attention`).

    With B rows of S tokens and b bytes per element, each kind of attention has a boolean mask
    of S S bytes, or B S S with documents or chunks. The layer that uses a mask also needs it in
    the compute dtype, to add it to the scores: B S S b. With written-out scores, each kind of
    attention has this mask too.
    """
    added = _added_bytes(workload)
    masks = {
        layer.attention: _boolean_bytes(model, layer, workload)
        + (added if layer_writes_scores(model, layer, workload) else 0)
        for layer in model.attention_kinds
        if is_masked(model, layer, workload)
    }
    return sum(masks.values()) + (added if masks else 0)


def lasting_mask_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the bytes of the masks of `mask_bytes` that also exist outside of layers, such as
    during the head.

    Each kind of attention has one mask. It is boolean, or in the compute dtype if the scores are
    written out. A step of gemma-2-9b, whose scores are written out, took 131 MiB more beside its
    head with 3 x 4,096 tokens than with 16 x 1,024. Its masks are 128 MiB larger
    (experiments/results/h200-default-set).
    """
    masks = {
        layer.attention: _added_bytes(workload)
        if layer_writes_scores(model, layer, workload)
        else _boolean_bytes(model, layer, workload)
        for layer in model.attention_kinds
        if is_masked(model, layer, workload)
    }
    return sum(masks.values())


def _boolean_bytes(model: ModelSpec, layer: LayerSpec, workload: Workload) -> int:
    """Returns the bytes of the layer's boolean mask."""
    each_row = workload.documents or model.part(layer.name).chunked
    return workload.sequence**2 * (workload.batch if each_row else 1)


def _added_bytes(workload: Workload) -> int:
    """Returns the bytes of a mask in the compute dtype, which is added to scores."""
    return workload.batch * workload.sequence**2 * DTYPE_BYTES[workload.dtype]


def is_masked(model: ModelSpec, layer: LayerSpec, workload: Workload) -> bool:
    """Returns whether the layer's attention has a mask."""
    if layer.attention == "linear_attention":
        return False
    separates = document_attention(model, workload)
    if workload.documents or (model.fuses_scores(workload) and separates == "lengths"):
        return separates == "mask"
    windowed = 0 < model.window(layer.name) <= workload.sequence
    return windowed or layer_writes_scores(model, layer, workload) or model.family in ALWAYS_MASKED


def writes_scores(model: ModelSpec, workload: Workload) -> bool:
    """Returns whether some layer writes out its attention scores."""
    return any(layer_writes_scores(model, layer, workload) for layer in model.attention_kinds)


def layer_writes_scores(model: ModelSpec, layer: LayerSpec, workload: Workload) -> bool:
    """Returns whether the layer writes out its attention scores."""
    return model.computed_part(layer.name, workload).scores.kept != Kept()


def saved_mask_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the most bytes that a decoder layer saves in addition because a fused attention
    kernel has a mask: the sum of `added_mask_bytes` and `repeated_bytes`.
    """
    return added_mask_bytes(model, workload) + repeated_bytes(model, workload)


def added_mask_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the bytes of the mask in the compute dtype that a fused attention kernel adds to
    its scores. Each layer makes and saves its own mask. 0 without a mask.

    With B rows of S tokens and b bytes per element, it is B S S b.
    """
    added = workload.tokens * workload.sequence * DTYPE_BYTES[workload.dtype]
    return added if _masks_a_kernel(model, workload) else 0


def repeated_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the bytes of the copies of keys and values that transformers makes for a fused
    attention kernel with a mask, if several query heads share a key. 0 without a mask.
    """
    heads, pairs, size = model.heads
    copied = 2 * (heads - pairs) * size * workload.tokens * DTYPE_BYTES[workload.dtype]
    return copied if _masks_a_kernel(model, workload) else 0


def _masks_a_kernel(model: ModelSpec, workload: Workload) -> bool:
    """Returns whether some layer has a fused attention kernel with a mask."""
    return any(
        is_masked(model, layer, workload) and not layer_writes_scores(model, layer, workload)
        for layer in model.attention_kinds
    )
