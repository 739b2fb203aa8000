"""The least a scatter-add can cost: take the output's memory, zero it, read the gradient once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.peers import Array, Call


def zeroing_and_reading(shape: tuple[int, ...], dY: Array, threads: int) -> Call:
    """A call that does just that on as many threads as our kernels use."""
    pool = ThreadPoolExecutor(threads)
    # As bytes, fill is memset; as 64-bit integers, max is NumPy's fastest pass over memory (twice as fast as sum).
    words = dY.reshape(-1).view(np.int64)

    def share(output: Array, number: int) -> None:
        low, high = (len(output) * n // threads for n in (number, number + 1))
        output[low:high].fill(0)
        low, high = (len(words) * n // threads for n in (number, number + 1))
        words[low:high].max()

    def call() -> Array:
        dX = np.empty(shape, dY.dtype)
        output = dX.reshape(-1).view(np.uint8)
        helpers = [pool.submit(share, output, number) for number in range(1, threads)]
        share(output, 0)
        for helper in helpers:
            helper.result()
        return dX

    return call
