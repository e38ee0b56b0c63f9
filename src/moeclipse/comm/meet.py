"""Ranks that start together find each other, whatever earlier starts have left in the store.

A store may outlive many starts: torchrun keeps one for all of them. Its agents count restarts each for
themselves, so once hosts have come and gone, ranks of one start no longer agree about which attempt it is; a
rank that believed in a number would read the addresses of dead ones, or wait for ever.

    each rank     leaves a word that nobody has said before under here/RANK
    rank 0        answers every such word with the name of this start, until all ranks have thanked for it
    each rank     waits for the answer to its own word

Contract. An answer to a fresh word comes from a rank 0 that lives now, and a launcher starts ranks only when
those before have ended. Words of the dead are answered, too, and nobody listens.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from moeclipse.core.errors import CommError

LOOK_S = 0.005


def meet(store: dist.Store, rank: int, num_ranks: int, patience: timedelta) -> str:
    """The name of this start, which no other has; the same on all ranks. Collective."""
    if rank == 0:
        return _call(store, num_ranks, patience)
    word = secrets.token_hex(8)
    store.set(f"here/{rank}", word)
    try:
        store.wait([f"answer/{word}"], patience)
    except RuntimeError as error:
        raise CommError(
            f"rank {rank} waited {patience.total_seconds():g} s for rank 0, which did not start"
        ) from error
    name = bytes(store.get(f"answer/{word}")).decode()
    store.set(f"thanks/{name}/{rank}", "")
    return name


def _call(store: dist.Store, num_ranks: int, patience: timedelta) -> str:
    name = secrets.token_hex(8)
    heard: set[str] = set()
    missing = list(range(1, num_ranks))
    until = time.monotonic() + patience.total_seconds()
    while missing:
        for rank in missing:
            if store.check([f"here/{rank}"]):
                word = bytes(store.get(f"here/{rank}")).decode()
                if word not in heard:
                    heard.add(word)
                    store.set(f"answer/{word}", name)
        missing = [rank for rank in missing if not store.check([f"thanks/{name}/{rank}"])]
        if missing and time.monotonic() > until:
            who = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise CommError(
                f"rank 0 waited {patience.total_seconds():g} s for rank {who}, which did not start"
            )
        time.sleep(LOOK_S if missing else 0.0)
    return name
