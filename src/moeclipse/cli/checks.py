"""What `moeclipse doctor` looks at. Every check yields findings: what there is, whether it works, what to do.

Checks try things instead of trusting version numbers: two forked ranks really all-reduce over loopback, a
network namespace is really made and removed. Each is safe to run beside a training run and leaves nothing
behind. Hazard: `backends` forks, so it must run before anything opens a CUDA device.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moeclipse import __version__
from moeclipse.cli.launch import usable_cores
from moeclipse.cli.two_ranks import Answer, ask_two_ranks
from moeclipse.core.host_memory import available_memory

if TYPE_CHECKING:
    from moeclipse.comm.shared.links import Topology

GIB = 2**30
NEEDED = ("torch", "numpy", "safetensors")
# Package -> (extra that installs it, what is missing without it); only what something here uses.
EXTRAS = {
    "tokenizers": ("hf", "text is read as bytes, data.tokenizer does not work"),
    "transformers": ("hf", "experts_implementation does not work; folders are read without it"),
    "peft": ("all", "its adapters in models of transformers do not work; lora.rank needs no peft"),
    "accelerate": ("all", "transformers' Trainer does not work"),
    "tensorboard": ("tensorboard", "metrics.tensorboard does not work"),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding."""

    section: str
    name: str
    state: Literal["works", "info", "limited", "broken"]
    """limited: something is lost but training runs; broken: training cannot run here."""
    value: str
    advice: str = ""


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> Iterator[Finding]:
    section = "versions"
    yield Finding(section=section, name="moeclipse", state="info", value=__version__)
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding(section=section, name="python", state="works", value=python)
    for name in NEEDED:
        found = version_of(name)
        if found is None:
            advice = f"pip install {name}"
            yield Finding(section=section, name=name, state="broken", value="missing", advice=advice)
        elif name == "torch" and tuple(map(int, found.split("+")[0].split(".")[:2])) < (2, 11):
            yield Finding(section=section, name=name, state="broken", value=found, advice="use torch >= 2.11")
        else:
            yield Finding(section=section, name=name, state="works", value=found)
    found = version_of("rich")
    state: Literal["works", "limited"] = "works" if found else "limited"
    advice = "" if found else "the display of moeclipse train needs it: pip install rich"
    yield Finding(section=section, name="rich", state=state, value=found or "missing", advice=advice)
    found = version_of("triton")
    advice = "" if found else "it comes with torch for CUDA; on CPU it is not used"
    yield Finding(section=section, name="triton", state="info", value=found or "missing", advice=advice)
    for name, (extra, use) in EXTRAS.items():
        found = version_of(name)
        advice = "" if found else f"{use}; pip install 'moeclipse[{extra}]'"
        yield Finding(section=section, name=name, state="info", value=found or "missing", advice=advice)


def backends() -> Iterator[Finding]:
    """Gloo is tried with two forked ranks; of NCCL see `exchange`."""
    section = "back ends"
    if importlib.util.find_spec("torch") is None:
        return
    import torch.distributed as dist

    if not dist.is_available():
        advice = "this torch was built without torch.distributed; install the official wheel"
        yield Finding(section=section, name="distributed", state="broken", value="missing", advice=advice)
        return
    yes, text = try_gloo()
    advice = "ranks on CPU cannot talk to each other; is loopback up (ip link set lo up), is fork allowed?"
    if yes:
        yield Finding(section=section, name="gloo", state="works", value=text)
    else:
        yield Finding(section=section, name="gloo", state="broken", value=text, advice=advice)


def try_gloo(timeout_s: float = 30.0) -> Answer:
    """Whether two ranks all-reduce over loopback."""
    return ask_two_ranks(_all_reduce, timeout_s)


def _all_reduce(rank: int, folder: str) -> Answer:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    begun = time.monotonic()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    value = torch.ones(4) * (rank + 1)
    dist.all_reduce(value)
    assert value.tolist() == [3.0] * 4, "the sum is wrong"
    dist.barrier()
    return True, f"two ranks met over loopback and all-reduced, in {1000 * (time.monotonic() - begun):.0f} ms"


def devices() -> Iterator[Finding]:
    section = "devices"
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version").exists()
        if torch.version.cuda is None:
            value = "this torch is built for CPU"
            advice = "install torch for CUDA to use the GPU" if driver else "training runs on CPU"
        else:
            value = f"torch for CUDA {torch.version.cuda} sees no device"
            advice = (
                "check nvidia-smi and CUDA_VISIBLE_DEVICES" if driver else "no NVIDIA driver; CPU is used"
            )
        state: Literal["limited", "info"] = "limited" if driver else "info"
        yield Finding(section=section, name="cuda", state=state, value=value, advice=advice)
        return
    count = torch.cuda.device_count()
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        value = (
            f"{device.name}, {device.total_memory / GIB:.0f} GiB, capability {device.major}.{device.minor}"
        )
        weak = device.major < 8
        advice = "bfloat16 is slow below capability 8.0; use --model.dtype float16" if weak else ""
        state_of: Literal["works", "limited"] = "limited" if weak else "works"
        yield Finding(section=section, name=f"cuda:{index}", state=state_of, value=value, advice=advice)
    if count > 1:
        from moeclipse.comm.shared.links import topology_here

        yield links(topology_here())


def links(topology: Topology) -> Finding:
    """How the devices here are joined; the same question decides how a run reduces."""
    pairs = {
        f"{a}-{b}": topology.joined(topology.uuids[a], topology.uuids[b])
        for a, b in combinations(range(len(topology.uuids)), 2)
    }
    apart = [pair for pair, how in pairs.items() if how == "nothing"]
    bus = [pair for pair, how in pairs.items() if how == "peer access"]
    if apart:
        value = f"not between {', '.join(apart[:8])}"
        advice = "those pairs copy through the host's memory"
        return Finding(section="devices", name="peer access", state="limited", value=value, advice=advice)
    if bus:
        value = f"{', '.join(bus[:8])} reach each other over the bus, not over NVLink"
        advice = "sums over peer memory read everybody's input in one stage there"
        return Finding(section="devices", name="peer access", state="works", value=value, advice=advice)
    value = f"all {len(topology.uuids)} devices have NVLink to each other"
    return Finding(section="devices", name="peer access", state="works", value=value)


def machine(directory: str) -> Iterator[Finding]:
    section = "machine"
    cores = usable_cores()
    advice = "two ranks share one core: slow, but it works" if cores < 2 else ""
    state: Literal["works", "limited", "broken"] = "limited" if cores < 2 else "works"
    yield Finding(
        section=section, name="cores", state=state, value=f"{cores} of {os.cpu_count()}", advice=advice
    )
    memory = available_memory()
    state = "works" if memory >= 2 * GIB else "limited"
    advice = "" if memory >= 2 * GIB else "the tiny preset on two ranks needs about 2 GiB"
    value = f"{memory / GIB:.1f} GiB available"
    yield Finding(section=section, name="memory", state=state, value=value, advice=advice)
    yield _shared_memory(section)
    folder = Path(directory).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    value = f"{free / GIB:.1f} GiB free for {directory}"
    if not os.access(folder, os.W_OK):
        advice = f"{folder} is not writable; choose another folder with --run.dir"
        yield Finding(section=section, name="disk", state="broken", value=value, advice=advice)
    else:
        low = free < GIB
        advice = "checkpoints may not fit; choose another folder with --run.dir" if low else ""
        yield Finding(
            section=section, name="disk", state="limited" if low else "works", value=value, advice=advice
        )


def _shared_memory(section: str) -> Finding:
    try:
        size = shutil.disk_usage("/dev/shm").free
    except OSError:
        advice = "NCCL and data loaders need it; mount a tmpfs there"
        return Finding(section=section, name="/dev/shm", state="limited", value="missing", advice=advice)
    small = size < 256 * 2**20
    advice = "containers: docker run --shm-size=8g, Kubernetes: an emptyDir of medium Memory" if small else ""
    value = f"{size / GIB:.1f} GiB free"
    return Finding(
        section=section, name="/dev/shm", state="limited" if small else "works", value=value, advice=advice
    )


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that change how ranks run or talk, and what each does."""
    section = "environment"

    def item(name: str, state: Literal["works", "info", "limited", "broken"], advice: str) -> Finding:
        return Finding(
            section=section, name=name, state=state, value=variables.get(name, "not set"), advice=advice
        )

    threads = variables.get("OMP_NUM_THREADS", "")
    if not threads:
        yield item("OMP_NUM_THREADS", "info", "moeclipse train gives each rank cores // ranks threads")
    elif threads.isdigit() and int(threads) > usable_cores():
        yield item("OMP_NUM_THREADS", "limited", f"more threads than cores ({usable_cores()}): unset it")
    else:
        yield item("OMP_NUM_THREADS", "info", "threads of each rank; it overrides cores // ranks")
    if variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield item("CUDA_VISIBLE_DEVICES", "limited", "it hides all GPUs; unset it to use them")
    elif "CUDA_VISIBLE_DEVICES" in variables:
        yield item("CUDA_VISIBLE_DEVICES", "info", "only these GPUs are used, one rank each")
    connections = "kernels of all streams queue behind each other, so nothing overlaps; unset it"
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield item(
            "CUDA_DEVICE_MAX_CONNECTIONS", "limited", f"{connections} (our ordering never depends on it)"
        )
    elif "CUDA_DEVICE_MAX_CONNECTIONS" in variables:
        yield item("CUDA_DEVICE_MAX_CONNECTIONS", "info", "hardware queues; our ordering never depends on it")
    yield from _interfaces(item, variables)
    slow = {
        "NCCL_P2P_DISABLE": "GPUs copy through the host",
        "NCCL_SHM_DISABLE": "ranks use the network instead",
    }
    for name in sorted(name for name in variables if name.startswith("NCCL_")):
        if name in slow and variables[name] == "1":
            yield item(name, "limited", f"{slow[name]}; unset it unless you need it")
        elif name not in ("NCCL_SOCKET_IFNAME", "NCCL_VERSION"):
            yield item(name, "info", "passed on to NCCL as it is")
    left = [name for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID") if name in variables]
    if left and "TORCHELASTIC_RESTART_COUNT" not in variables:
        yield item(
            left[0], "limited", "moeclipse train would join other ranks instead of starting its own; unset it"
        )


def _interfaces(item: Callable[..., Finding], variables: Mapping[str, str]) -> Iterator[Finding]:
    known = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if variable not in variables:
            continue
        wanted = variables[variable].lstrip("^=").split(",")
        # NCCL takes prefixes, gloo whole names.
        fits = str.__eq__ if variable.startswith("GLOO") else str.startswith
        missing = [name for name in wanted if not any(fits(each, name) for each in known)]
        if missing and not variables[variable].startswith("^"):
            advice = f"no interface {', '.join(missing)} here; there are {', '.join(known)}"
            yield item(variable, "broken" if variable.startswith("GLOO") else "limited", advice)
        else:
            yield item(variable, "info", "ranks talk over this interface")


def network() -> Iterator[Finding]:
    """What several hosts, and the benchmarks on a shaped network, need."""
    section = "network"
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        yield Finding(section=section, name="host name", state="works", value=f"{name} is {address}")
    except OSError:
        advice = "only matters on several hosts: set GLOO_SOCKET_IFNAME to the interface between them"
        yield Finding(
            section=section, name="host name", state="info", value=f"{name} is unknown", advice=advice
        )
    problem = try_namespace()
    value = problem or "made, shaped to 1 Gbit/s and removed"
    advice = "only benchmarks on a shaped network need them (root and iproute2)" if problem else ""
    state: Literal["works", "info"] = "info" if problem else "works"
    yield Finding(section=section, name="namespaces", state=state, value=value, advice=advice)


def try_namespace() -> str:
    """Empty when a network namespace with a slow loopback can be made here; else what is in the way."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} command"
    if os.geteuid() != 0:
        return "not root"
    name = f"moeclipse-{os.getpid()}"
    shape = shlex.split("tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 400ms")
    steps = [["ip", "netns", "add", name], ["ip", "netns", "exec", name, *shape]]
    try:
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, timeout=10)
            if done.returncode:
                return f"{' '.join(step[:3])}: {(done.stderr.strip() or 'failed').splitlines()[0]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return ""
