"""The name that `moe/experts/module_experts` had in version 0.1 (docs/compatibility.md)."""

from moeclipse.moe.experts.module_experts import joint

__all__ = ["joint"]
