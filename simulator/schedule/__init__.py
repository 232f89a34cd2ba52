"""Schedule: the program of one optimizer step, which the simulator plays and the runtime executes.

A schedule lists its ops in program order. Each op belongs to a lane, and a lane runs its ops one
at a time in program order. An op starts when its lane reaches it and all of its dependencies have
ended. An op names the buffers that it reads and writes, in the order that its kind fixes (see
below). It also names the buffers that it acquires and releases: a buffer is in use from the start
of the op that acquires it to the end of the op that releases it. An op has sizes, never a duration.

Kinds of ops, their operands, and their lane if it is always the same:

* `load_weights` (h2d): host weights -> weight slot
* `embed`: embedding weights, tokens -> hidden
* `forward`: weights, hidden -> hidden
* `head`: head weights, hidden, tokens -> weight gradient, gradient of hidden, loss
* `loss`: head weights, hidden, tokens -> loss
* `recompute`: weights, hidden[, attention] -> saved activations[, hidden]
* `backward`: weights, saved activations, hidden, gradient of the output[, attention] -> weight
  gradient, gradient of the input
* `embed_backward`: tokens, gradient of hidden -> weight gradient
* `save_gradients` (d2h): device gradient -> staging buffer or host gradient
* `accumulate_gradients` (cpu): staging buffer -> host gradient
* `load_second_moment` (h2d): host moments -> a chunk of moments; copies only the second moment
* `norm`: gradient -> the layer's sum of squares, or one for each of its tensors
* `encode_gradients`: gradient -> the gradient in 8-bit codes, which updates read
* `update_ratios`: gradient, moments -> sums of g^2 / v over 64 elements each, where v is the second
  moment after this step
* `clip`: every sum of squares, every loss -> the clip coefficient, or NaN if a value that it read
  is not finite
* `clip` of one layer: the layer's sum of squares or its sums of g^2 / v, every loss -> the layer's
  coefficient or its tensors' factors, or NaN if a value that it read is not finite. With clipping
  by `adagc` it also reads the moving norms of the layer's tensors and writes their new values
* `update`, `cpu_update`: gradient, clip coefficient or factors[, weights] -> weights[, low half of
  the master][, moments][, weight slot][, workspace]
* `load_state` (h2d), `save_state` (d2h): one buffer for each class of data -> buffers of the same
  classes
* `load_gradients` (h2d): host gradient -> device gradient
* `save_activations` (d2h), `load_activations` (h2d): hidden -> hidden
* `save_attention` (d2h), `load_attention` (h2d): attention -> attention

Plans for several GPUs also have collectives. A *part* is what one rank owns of a layer:

* `gather_weights` (exchange): the rank's part of the weights, in a buffer of its own or already in
  the slot -> slot with the parts of all ranks
* `exchange_gradients` (exchange): gradient of a whole layer, or two with tied embeddings[, part of
  the gradient] -> part of the gradient, workspace. Each part is exchanged in pieces of `elements`
* `sum_rows`: part of the gradient -> the sum of squares of each `NORM_ROW` elements
* `exchange_sums` (exchange): sums of rows, losses of this rank -> sums of squares of all layers,
  losses of all ranks, workspace. In an evaluation it exchanges only losses

Schedules of other systems can only be predicted. They have further kinds, whose operands are in no
fixed order:

* `cpu_adam` (cpu): a fused, vectorized AdamW on the host
* `host_pass` (cpu): an elementwise pass by all host threads, such as a copy, a scaling or a zeroing
* `thread_pass` (cpu, or h2d in series with a copy): an elementwise pass by one host thread
* `device_pass` (compute): an elementwise pass on the device, such as a copy, a cast or a part of
  the loss

The `bytes` of these four kinds count what the op reads and writes.

Rules:

* A forward that also writes saved activations, in `device.saved_activations`, saves them for its
  backward.
* A forward that also writes attention, in `device.attention`, saves the layer's attention output
  and log-sum-exp. The layer's recompute then reads them and skips attention. Its backward reads
  them too. Between the forward and the recompute they may be in host memory.
* An update does nothing if its coefficient is NaN. If it also reads weights, it takes the old
  weights from that buffer. If it also writes a weight slot, it leaves a copy of the new weights
  there.
* An update whose optimizer multiplies matrices has `flops`, and writes its temporary values to a
  workspace.
* An op that reads and writes the same gradient adds to it. An op that only writes it overwrites it.
* `host.moments:12#3` is part 3 of a buffer. Two parts never overlap, and the whole buffer overlaps
  each of its parts.
"""

from megatrain.simulator.schedule.buffer import Buffer, BufferDtype, DataClass
from megatrain.simulator.schedule.op import (
    CODES,
    LANES,
    OFFLOADING,
    SAVED_ACTIVATIONS,
    SAVED_ATTENTION_SUFFIX,
    WHOLE_SUFFIX,
    Op,
    OpId,
    ScheduleError,
    base_buffer,
    computes_output,
    has_saved_attention,
    is_whole,
    parse_id,
    saves_activations,
)
from megatrain.simulator.schedule.schedule import Schedule, Sizes, restricted_to_kinds, serialized

__all__ = [
    "CODES",
    "SAVED_ACTIVATIONS",
    "SAVED_ATTENTION_SUFFIX",
    "WHOLE_SUFFIX",
    "LANES",
    "OFFLOADING",
    "Buffer",
    "BufferDtype",
    "DataClass",
    "Op",
    "OpId",
    "Schedule",
    "ScheduleError",
    "Sizes",
    "computes_output",
    "has_saved_attention",
    "is_whole",
    "parse_id",
    "restricted_to_kinds",
    "saves_activations",
    "serialized",
    "base_buffer",
]
