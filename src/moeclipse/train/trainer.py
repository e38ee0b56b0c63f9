"""The name that `train/run/trainer` had in version 0.1 (docs/compatibility.md)."""

from moeclipse.train.run.trainer import train

__all__ = ["train"]
