"""The name that `comm/transports/open` had in version 0.1 (docs/compatibility.md)."""

from moeclipse.comm.transports.open import open_wire

__all__ = ["open_wire"]
