"""How far the streams of a device are, told without asking the driver.

A stream that gets to a mark writes a number into host memory; whoever looks reads a word. Asking for an event
instead can wait inside the driver for the very transfer that hangs, and hold everybody up.
"""

from __future__ import annotations

import torch

from moeclipse.ops.cuda_driver import LOW, cuda_driver

WORD = 4


class DeviceMarks:
    def __init__(self, num_words: int) -> None:
        """Needs a CUDA device: the memory is registered with it."""
        self._words = torch.full((num_words,), -1, dtype=torch.int32, pin_memory=True)
        self._values = self._words.numpy()
        self._driver = cuda_driver()
        self._address = self._driver.device_address(self._words.data_ptr())

    def write(self, stream: int, word: int, number: int) -> None:
        """When the stream of that handle gets here. A captured graph has no marks: it runs many times."""
        if not torch.cuda.is_current_stream_capturing():
            self._driver.write(stream, self._address + WORD * word, number)

    def read(self) -> list[int]:
        found: list[int] = self._values.tolist()
        return found

    @staticmethod
    def value(number: int) -> int:
        """What a word reads like after `number` was written: 32 bits with a sign."""
        low = number & LOW
        return low - (1 << 32) if low >> 31 else low
