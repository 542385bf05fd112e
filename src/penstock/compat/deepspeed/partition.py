"""Where DeepSpeed cuts a list of layers: the same bounds as `deepspeed.runtime.utils` gives for the same weights.

`bounds[k]` is the first layer of stage k, and the last bound is the number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """As many layers for each stage, the first ones getting one more; stages that are left over get none.

    >>> partition_uniform(8, 3)
    [0, 3, 6, 8]
    """
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Runs of layers whose heaviest and lightest differ by as little as a stagewise search finds; of equal ones the latest cut.

    >>> partition_balanced([4, 1, 1, 1, 1, 4], 3)
    [0, 1, 5, 6]
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=float))])
    # For the first n layers in so many stages: the heaviest and the lightest of the best cut
    heaviest, lightest = np.full(count + 1, np.inf), np.full(count + 1, np.inf)
    heaviest[0] = 0.0
    starts: list[list[int]] = []
    for _ in range(num_parts):
        before = heaviest, lightest
        heaviest, lightest = np.full(count + 1, np.inf), np.full(count + 1, np.inf)
        row = [0] * (count + 1)
        for n in range(1, count + 1):
            last = sums[n] - sums[:n]
            most, least = np.maximum(before[0][:n], last), np.minimum(before[1][:n], last)
            row[n] = n - 1 - int(np.argmin((most - least)[::-1]))
            heaviest[n], lightest[n] = most[row[n]], least[row[n]]
        starts.append(row)
    bounds = [count]
    for row in reversed(starts):
        bounds.append(row[bounds[-1]])
    return bounds[::-1]
