"""DeepSpeed's streams derived a second time, from the position of each microbatch at each step.

In training, stage s of p runs the forward of microbatch m in step 2m + s and its backward in step 2m + 2p - 1 - s; in inference
the forward in step m + s. Messages are written down in the step in which they are exchanged.
"""

from __future__ import annotations

Steps = list[list[str]]


def train(micro_batches: int, stages: int, stage: int) -> Steps:
    first, last = stage == 0, stage == stages - 1
    events: list[tuple[int, int, str, int]] = []  # step, place within the step, name, microbatch
    for m in range(micro_batches):
        forward, backward = 2 * m + stage, 2 * (m + stages) - 1 - stage
        events += [] if first else [(forward, 1, "RecvActivation", m), (backward + 1, 0, "SendGrad", m)]
        events += [] if last else [(forward + 1, 1, "SendActivation", m), (backward, 0, "RecvGrad", m)]
        events += [(forward, 2, "LoadMicroBatch", m)] if first or last else []
        events += [(forward, 3, "ForwardPass", m), (backward, 3, "BackwardPass", m)]
    steps = _placed(events, 2 * (micro_batches + stages - 1), train_buffers(micro_batches, stages, stage))
    steps[-1] += ["ReduceTiedGrads()", "ReduceGrads()", "OptimizerStep()"]
    return steps


def train_buffers(micro_batches: int, stages: int, stage: int) -> int:
    """One for every microbatch that is between this stage and the end, and never fewer than two."""
    return max(2, min(stages - stage, micro_batches))


def inference(micro_batches: int, stages: int, stage: int) -> Steps:
    first, last, even = stage == 0, stage == stages - 1, stage % 2 == 0
    events: list[tuple[int, int, str, int]] = []
    for m in range(micro_batches):
        events += [(m + stage, 0, "LoadMicroBatch", m)] if first or last else []
        events += [] if first else [(m + stage, 2 if even else 1, "RecvActivation", m)]
        events += [] if last else [(m + stage + 1, 1 if even else 2, "SendActivation", m)]
        events.append((m + stage, 3, "ForwardPass", m))
    return _placed(events, micro_batches + stages - 1, 2)


def data_parallel(micro_batches: int) -> Steps:
    each = [f"{name}(buffer_id=0)" for name in ("LoadMicroBatch", "ForwardPass", "BackwardPass")]
    return [*[list(each) for _ in range(micro_batches - 1)], [*each, "ReduceGrads()", "OptimizerStep()"]]


def _placed(events: list[tuple[int, int, str, int]], count: int, buffers: int) -> Steps:
    steps: Steps = [[] for _ in range(count)]
    for step, _, name, m in sorted(events):
        steps[step].append(f"{name}(buffer_id={m % buffers})")
    return steps
