const BLOCK = 128;

/** The sum in the order in which NumPy adds: eight sums side by side, longer arrays by halves. */
export function pairwiseSum(values: ArrayLike<number>, low = 0, high = values.length): number {
  const count = high - low;
  if (count < 8) {
    let sum = 0;
    for (let k = low; k < high; k++) sum += values[k];
    return sum;
  }
  if (count > BLOCK) {
    const half = low + (count >> 1) - ((count >> 1) % 8);
    return pairwiseSum(values, low, half) + pairwiseSum(values, half, high);
  }
  const part = Array.from({ length: 8 }, (_, k) => values[low + k]);
  let at = low + 8;
  for (; at < low + count - (count % 8); at += 8) for (let k = 0; k < 8; k++) part[k] += values[at + k];
  let sum = part[0] + part[1] + (part[2] + part[3]) + (part[4] + part[5] + (part[6] + part[7]));
  for (; at < high; at++) sum += values[at];
  return sum;
}
