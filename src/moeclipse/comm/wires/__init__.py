"""The name that `comm/transports` had until version 0.2 (docs/compatibility.md)."""
