"""What `moeclipse doctor` says about peer memory: whether ranks here can use it, and from which size on how.

Two forked ranks really open it and reduce 64 KB. Hazard: it forks, so it must run before anything opens a
CUDA device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Literal

from moeclipse.cli.checks import Finding
from moeclipse.cli.two_ranks import Answer, ask_two_ranks

SECTION = "peer memory"
PATIENCE_S = 30.0
ROUNDS = 50


def try_peers(timeout_s: float = PATIENCE_S) -> Answer:
    """Whether two ranks here reduce through peer memory."""
    if importlib.util.find_spec("torch") is None:
        return False, "torch is missing"
    return ask_two_ranks(_reduce, timeout_s)


def _reduce(rank: int, folder: str) -> Answer:
    import time

    import torch
    import torch.distributed as dist

    from moeclipse.comm.mesh import Mesh
    from moeclipse.comm.reduce.all_reduce import PeerAllReduce

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = Mesh.of_world(ep=2, deadline_s=PATIENCE_S)
    x = torch.ones(1 << 14)
    with PeerAllReduce.open(mesh.world, mesh.watch) as reduce:
        use = reduce.should_use(x)
        times = []
        for _ in range(ROUNDS if use else 1):
            begun = time.perf_counter()
            assert float(reduce.all_reduce(x)[0]) == 2.0
            times.append(time.perf_counter() - begun)
    how = f"{use.why}; two of them reduced 64 KB in {1e6 * sorted(times)[len(times) // 2]:.0f} us"
    return bool(use), how if use else use.why


def peers(answer: Answer) -> Iterator[Finding]:
    """The answer of two ranks, and the table for this machine's processors and devices."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from moeclipse.comm.reduce.table import DEFAULT_FILE, table_lines
    from moeclipse.comm.shared.links import topology_here
    from moeclipse.core.errors import ConfigError

    yes, text = answer
    state: Literal["works", "limited"] = "works" if yes else "limited"
    advice = (
        "" if yes else "ranks reduce through torch.distributed instead, which is slower for small tensors"
    )
    yield Finding(section=SECTION, name="all-reduce", state=state, value=text, advice=advice)
    kinds = {"cpu": True}
    seen = topology_here()
    for index in range(torch.cuda.device_count()):
        kinds[torch.cuda.get_device_name(index)] = seen.linked(seen.uuids)
    for kind, linked in kinds.items():
        try:
            for line in table_lines(kind, linked):
                yield Finding(section=SECTION, name=kind, state="info", value=line)
        except ConfigError as error:
            advice = f"remove {DEFAULT_FILE}, or write it anew with bench/all_reduce.py --tune"
            yield Finding(section=SECTION, name=kind, state="limited", value=str(error), advice=advice)
