"""Two hosts: two network namespaces joined by a cable, torchrun on each, and the loss of one process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cables import Host, two_hosts

SOURCE = str(Path(__file__).parent.parent.parent / "src")
CONFIG = """
[run]
steps = 6
device = "cpu"

[model]
num_layers = 2
d_model = 32
num_heads = 2
num_kv_heads = 1
head_dim = 16
dtype = "float64"

[moe]
num_experts = 5
d_ff = 32

[data]
seq_len = 32
batch_size = 5

[optim]
lr = 1e-2
warmup_steps = 2
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield found


def clean_environment() -> dict[str, str]:
    hidden = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "GLOO_SOCKET_IFNAME")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.root
def test_two_hosts_train_like_one_process(tmp_path: Path, hosts: list[Host]) -> None:
    (tmp_path / "mini.toml").write_text(CONFIG)
    train = ["-m", "moeclipse", "train", "mini.toml"]
    endpoint = f"{hosts[0].address}:29500"
    nodes = []
    for number, host in enumerate(hosts):
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--rdzv-id",
            "job",
        ]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", host.address]
        # Both hosts bear one name here, so torchrun cannot see by itself which of them holds the endpoint.
        torchrun += ["--rdzv-conf", f"is_host={int(number == 0)},join_timeout=60"]
        command = ["ip", "netns", "exec", host.space, sys.executable, *torchrun, *train, "--run.name", "two"]
        environment = clean_environment() | {"GLOO_SOCKET_IFNAME": host.interface}
        node = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        nodes.append(node)
    try:
        outputs = [node.communicate(timeout=900)[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()  # torchrun ends its ranks on SIGTERM
        for node in nodes:
            node.wait(timeout=900)
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert sum("2 ranks (dp 1 x ep 2)" in output for output in outputs) == 1

    alone = subprocess.run(
        [sys.executable, *train, "--ranks", "1", "--run.name", "one"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert alone.returncode == 0, alone.stderr
    one, two = losses(tmp_path / "runs" / "one"), losses(tmp_path / "runs" / "two")
    assert len(one) == 6
    assert two == pytest.approx(one, rel=1e-12)
    assert one[-1] < one[0]
