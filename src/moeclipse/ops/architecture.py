"""GPUs as the kernels see them: in which form tiles are loaded, and what a block of threads may take.

    descriptor   the copy engine brings tiles (TMA): Hopper and data-center Blackwell
    pointer      threads copy 16 bytes each: every other GPU with tensor cores for bf16

Limits are those of the vendors' tables. A device that is not named here is taken for the named one that it
resembles: of the same generation, with no more shared memory than it says it has.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

KIB = 1024
Form = Literal["descriptor", "pointer"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    name: str
    """As compilers call it."""
    form: Form
    shared: int
    """Bytes of shared memory that one block may take."""
    shared_of_all: int
    """Bytes that all blocks of a multiprocessor share, of which each block costs the driver 1 KiB."""
    registers: int = 255
    """Of 32 bits, that one thread may have."""
    warp: int = 32
    devices: str = ""
    """What people call them."""

    @property
    def table(self) -> str:
        """Whose tiles it uses (`tuning.TABLES`); Hopper has some for pointers, too, to try them."""
        return "sm_90, pointers" if (self.name, self.form) == ("sm_90", "pointer") else self.name

    @property
    def vendor(self) -> Literal["cuda", "hip"]:
        return "hip" if self.name.startswith("gfx") else "cuda"


def _architecture(name: str, form: Form, shared: int, of_all: int, devices: str, **more: int) -> Architecture:
    sizes = {"shared": shared * KIB, "shared_of_all": of_all * KIB}
    return Architecture(name=name, form=form, devices=devices, **sizes, **more)


ARCHITECTURES = {
    each.name: each
    for each in (
        _architecture("sm_80", "pointer", 163, 164, "A100, A800, A30"),
        _architecture("sm_86", "pointer", 99, 100, "A10, A40, RTX 3090"),
        _architecture("sm_89", "pointer", 99, 100, "L4, L40S, RTX 4090"),
        _architecture("sm_90", "descriptor", 227, 228, "H100, H200, GH200"),
        _architecture("sm_100", "descriptor", 227, 228, "B200, GB200"),
        _architecture("sm_120", "pointer", 99, 100, "RTX 5090, RTX PRO 6000"),
        # 512 registers for each of the 64 lanes; a block may take all 64 KiB of a compute unit.
        _architecture("gfx942", "pointer", 64, 64, "MI300X, MI325X", registers=512, warp=64),
    )
}


def resembling(major: int, shared: int) -> Architecture | None:
    """The NVIDIA architecture that a capability and the shared memory of a block resemble; None: too old.

    (8, 163 KiB) -> sm_80 · (8, 99 KiB) -> sm_86 · (7, 96 KiB) -> None. A generation that is not named takes
    pointers, which all have.
    """
    named = [each for each in ARCHITECTURES.values() if each.vendor == "cuda" and each.shared <= shared]
    same = [each for each in named if each.name[3:-1] == str(major)]
    if major > 8 and not same:
        same = [each for each in named if each.name == "sm_86"]
    return max(same, key=lambda each: each.shared, default=None)


@functools.cache
def architecture_of(device: torch.device) -> Architecture | None:
    """What a device is to the kernels; None: they do not run on it."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        # Compute units of other generations multiply by other instructions, or have other warps.
        return ARCHITECTURES.get(properties.gcnArchName.partition(":")[0])
    usual = 227 * KIB if properties.major in (9, 10) else 99 * KIB  # not every torch tells
    return resembling(properties.major, getattr(properties, "shared_memory_per_block_optin", usual))
