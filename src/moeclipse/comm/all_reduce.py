"""The name that `comm/reduce/all_reduce` had in version 0.1 (docs/compatibility.md)."""

from moeclipse.comm.reduce.all_reduce import PeerAllReduce

__all__ = ["PeerAllReduce"]
