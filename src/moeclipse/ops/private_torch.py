"""Every private name of torch that this room uses. All are there in torch 2.11 to 2.13.

torch._C._cuda_getCurrentRawStream    the stream's handle, for the driver: `torch.cuda.current_stream`
                                      makes an object first, as slow as the rest of a small launch
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def raw_stream_function() -> Callable[[int], int]:
    """Gives the handle of the current stream of a device; AttributeError in a torch without CUDA."""
    return torch._C._cuda_getCurrentRawStream
