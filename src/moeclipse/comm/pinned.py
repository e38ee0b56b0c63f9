"""The name that `comm/transports/copy_engines` had in version 0.1 (docs/compatibility.md)."""

from moeclipse.comm.transports.copy_engines import pinned

__all__ = ["pinned"]
