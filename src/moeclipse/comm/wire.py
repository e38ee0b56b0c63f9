"""The name that `comm/wires/open` had in version 0.1 (docs/compatibility.md)."""

from moeclipse.comm.wires.open import open_wire

__all__ = ["open_wire"]
