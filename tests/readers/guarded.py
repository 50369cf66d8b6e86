"""Memory with a page behind it (and one before it) that nobody may touch: code that reads or writes there dies on the spot.

    python -m tests.readers.guarded FIRST LAST

reads damaged traces of the seeds FIRST to LAST - 1 with every array that compiled code sees in such memory, and as small as can be.
"""

import ctypes
import mmap
import random
import sys

import numpy as np

PAGE = mmap.PAGESIZE
_NO_ACCESS = 0


def guarded(count):
    """``count`` bytes that end where the forbidden page begins."""
    size = -(-count // PAGE) * PAGE
    area = mmap.mmap(-1, size + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    protect = ctypes.CDLL(None).mprotect
    for page in (start, start + PAGE + size):
        if protect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), _NO_ACCESS):
            raise OSError("mprotect failed")
    return np.frombuffer(area, np.uint8, count, PAGE + size - count)


class GuardedNumpy:
    """numpy, but new arrays lie in guarded memory."""

    def __getattr__(self, name):
        return getattr(np, name)

    def full(self, shape, value, dtype):
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array = guarded(count).view(dtype).reshape(shape) if count else np.empty(shape, dtype)
        array[...] = value
        return array

    def empty(self, shape, dtype):
        return self.full(shape, 0x5A, dtype)  # what was there before: anything

    def zeros(self, shape, dtype):
        return self.full(shape, 0, dtype)


def damaged(data, dice):
    """The text after a few random changes, insertions of JSON's own characters, deletions, doublings, and maybe a cut."""
    data = bytearray(data)
    for _ in range(dice.choice([1, 3, 30])):
        at = dice.randrange(len(data))
        kind = dice.randrange(4)
        if kind == 0:
            data[at] = dice.randrange(256)
        elif kind == 1:
            del data[at : at + dice.randrange(1, 20)]
        elif kind == 2:
            data[at:at] = bytes(dice.choices(b'"{}[],:\\0e-.\x00', k=dice.randrange(1, 6)))
        else:
            data[at:at] = data[max(0, at - 40) : at]
    return bytes(data[: dice.randrange(len(data))] if dice.random() < 0.3 else data)


def main(first, last):
    from tests.builder import Trace
    from tests.readers.made import read
    from tracekit.errors import InputError
    from tracekit.readers import pool, stream, worker
    from tracekit.readers.kineto import warm_up

    warm_up()  # numba is to see numpy itself
    for module in (pool, stream, worker):
        module.np = GuardedNumpy()
    worker.LEAST_ROWS, worker.LANES, worker.ENTRIES, worker.LEAST_ROOM = 2, 1, 64, 1
    for seed in range(first, last):
        dice = random.Random(seed)
        worker.ARENA = dice.choice([1 << 10, 1 << 14])  # either the bytes or the entries are full first
        trace = Trace(0, 2)
        for i in range(dice.randrange(1, 40)):
            trace.kernel("k" * dice.randrange(1, 70) + str(i), i, "0.5", launch=i, op="aten::mm", tid=dice.randrange(5))
            trace.collective("allreduce", 320, 180, launch=200, seq=i)
        text = trace.text(indent=dice.choice([None, 1])).encode()
        try:
            read(damaged(text, dice) if seed % 4 else text, chunk=dice.choice([100, 700, 5000, 1 << 16]))
        except InputError:
            continue


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
