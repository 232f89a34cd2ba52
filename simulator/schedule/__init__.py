"""Schedule: the one program that the simulator plays and the runtime executes.

Ops stand in program order. Each belongs to a lane; a lane runs its ops one at a time, in that order. An op starts when its lane
reaches it and all of its dependencies have ended. It names the buffers that it reads and writes, in the order that its kind fixes
(the table below), and those whose hold begins (`acquires`) or ends (`releases`) with it. It has sizes, never a duration.

| kind | reads | writes |
|---|---|---|
| load_weights (h2d) | host weights | weight slot |
| embed | embedding weights, tokens | hidden |
| forward | weights, hidden | hidden |
| head | head weights, hidden, tokens | gradient of the weights, gradient of hidden, loss |
| loss | head weights, hidden, tokens | loss |
| recompute | weights, hidden[, attention] | saved activations[, hidden] |
| backward | weights, saved activations, hidden, gradient of the output[, attention] | gradient of the weights, gradient of the input |
| embed_backward | tokens, gradient of hidden | gradient of the weights |
| save_gradients (d2h) | device gradient | host slab or host gradient |
| accumulate_gradients (cpu) | slab | host gradient |
| load_second (h2d) | host moments | a chunk of moments, of which only the second is loaded |
| norm | gradient | the layer's sum of squares |
| ratios | gradient, moments | sums of g^2 / v by 64 elements, v the second moment after this step |
| clip | every sum of squares, every loss | the clip coefficient, NaN where one of them is not finite |
| clip of a layer | its sum of squares or its sums of g^2 / v, every loss | its coefficient, or its tensors' learning rate factors, likewise |
| update, cpu_update | gradient, clip coefficient or factors[, weights] | weights[, low plane], moments[, weight slot] |
| load_state (h2d), save_state (d2h) | one buffer per class | the same classes elsewhere |
| load_gradients (h2d) | host gradient | device gradient |
| save_activations (d2h), load_activations (h2d) | hidden | hidden |

and, in schedules of other systems, which are only for prediction, so what they read and write is in no fixed order:

| kind | what its bytes are |
|---|---|
| cpu_adam (cpu) | read and written by a fused, vectorised AdamW of the host |
| host_pass (cpu) | read and written by an elementwise pass of all the host's threads: copying, scaling, zeroing |
| thread_pass (cpu) | the same by one thread |
| device_pass (compute) | read and written in device memory: copies, casts, the loss's elementwise passes |

A forward that also writes saved activations keeps them for its backward. One that also writes attention, in `device.attention`, keeps that layer's attention
output and log-sum-exp: its recompute takes them instead of computing them, and its backward needs them. An update does nothing where its coefficient is NaN;
one that also reads weights takes the old ones from there, one that also writes a weight slot leaves a copy of the new ones in it. An op that writes its
gradient *and reads it* adds to what is there; one that only writes it overwrites. `host.moments:12#3` is part 3 of a buffer: two parts never overlap, the
whole overlaps every part.
"""

from megatrain.simulator.schedule.buffer import Buffer, BufferDtype, DataClass
from megatrain.simulator.schedule.op import CODES, KEPT, LANES, Op, OpId, ScheduleError, is_kept, parse_id, whole
from megatrain.simulator.schedule.schedule import Schedule, Sizes, restricted, serialized

__all__ = [
    "CODES", "KEPT", "LANES", "Buffer", "BufferDtype", "DataClass", "Op", "OpId", "Schedule", "ScheduleError", "Sizes", "is_kept", "parse_id", "restricted",
    "serialized", "whole",
]  # fmt: skip
