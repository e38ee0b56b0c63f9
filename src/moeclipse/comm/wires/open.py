"""The name that `comm/transports/open` had until version 0.2 (docs/compatibility.md)."""

from moeclipse.comm.transports.open import open_wire

__all__ = ["open_wire"]
