"""The name that `comm/wires/copy_engines` had in version 0.1 (docs/compatibility.md)."""

from moeclipse.comm.wires.copy_engines import pinned

__all__ = ["pinned"]
