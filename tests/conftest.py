"""Shared by all tests: one torch thread (ranks are forked), poisoned memory, and what machines cannot do."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from zlib import crc32

import pytest

from moeclipse.core.forking import ONE_THREAD

# Before torch is loaded: on Arm its products start threads whatever it is told later, and no fork survives.
os.environ |= ONE_THREAD

import torch
from hypothesis import settings

from cpu_by_file import CpuByFile
from large_pages import use_large_pages
from moeclipse.comm.shared.fence import unordered_reason
from selection import LONG_PART, LongPart, Shard, in_turn, shuffled

# Whether there is a GPU is asked through NVML: CUDA itself, once asked, spoils all ranks forked later.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
torch.set_num_threads(1)
# torch.empty returns NaN (largest value for integers), so whoever reads what nobody wrote is found out.
# Not by `torch.use_deterministic_algorithms`: it loads torch's compiler, 80 MiB that every fork would copy.
torch._C._set_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
# A slow example says that the machine is busy, not that the code is wrong.
# The short part tries the same examples every time, so that it is red for what was changed; the long part
# looks for new ones.
settings.register_profile("short", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=200)
settings.load_profile("short")
MANY = 50
"""Tests for which it pays to make forks cheap first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="tests marked `full`, too; so do `-m full`, and naming such a test (FILE::TEST)",
    )
    parser.addoption(
        "--shard",
        metavar="K/N",
        help="only the K-th of N parts of the tests; `next/N` takes the part whose turn it is at this hour",
    )
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="files in random order, and the tests of each",
    )
    parser.addoption(
        "--cpu",
        nargs="?",
        const="",
        metavar="FILE",
        help="tell what each file of tests costs in CPU seconds, children included; of every test in FILE",
    )


def asks_for_long(config: pytest.Config) -> bool:
    return bool(config.getoption("--long")) or "full" in config.option.markexpr.replace("not full", "")


def pytest_configure(config: pytest.Config) -> None:
    if asks_for_long(config):
        settings.load_profile("long")
    if not hasattr(config, "workerinput"):  # workers find it in their environment
        os.environ["MOECLIPSE_TESTS_SHARED"] = tempfile.mkdtemp(prefix="moeclipse-tests-")
    if config.getoption("--shard"):
        config.option.shard = str(Shard(config.option.shard))  # workers shall not ask which turn it is, too
    if config.getoption("--cpu") is not None:
        config.pluginmanager.register(CpuByFile(config.getoption("--cpu")))


def pytest_unconfigure(config: pytest.Config) -> None:
    # Triton's library says on its way out what it leaks, fifty lines behind the result of every run.
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno()))
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["MOECLIPSE_TESTS_SHARED"], ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of other shards are not even imported: all files take half a minute, in each worker."""
    if not config.option.shard or collection_path.suffix != ".py":
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    return Shard(config.option.shard).has_none_of(file) or None


@pytest.hookimpl(tryfirst=True)  # before -m asks for markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for = asks_for_long(config)
    shard = Shard(config.option.shard or "1/1")
    long_part = LongPart(LONG_PART.read_text())
    is_all = config.args_source != config.ArgsSource.ARGS and not config.option.shard
    if is_all and (stale := long_part.stale(i.nodeid for i in items)):
        told = f"{LONG_PART.name} names what is not there: {', '.join(stale)}"
        print(told, file=sys.__stderr__)  # of a worker's own error nobody hears
        raise pytest.UsageError(told)
    for item in items:
        if long_part.holds(item.nodeid):
            item.add_marker(pytest.mark.full)

    def is_meant(item: pytest.Item) -> bool:
        named = asked_for or any("::" in argument for argument in config.args)
        return shard.holds(item.nodeid) and (named or not item.get_closest_marker("full"))

    config.hook.pytest_deselected(items=[item for item in items if not is_meant(item)])
    items[:] = in_turn(filter(is_meant, items), late=uses_transformers)
    if config.getoption("--shuffle") is not None:
        items[:] = shuffled(items, config.getoption("--shuffle"))


def pytest_collection_finish(session: pytest.Session) -> None:
    if len(session.items) >= MANY:
        make_forks_cheap()


def make_forks_cheap() -> None:
    """What is loaded by now stays: no collector of a fork looks through it, which would copy it."""
    # autograd loads it, with sympy, when it is first given a gradient to begin from, as by every stage of a
    # pipeline: two thirds of what a step of two such ranks costs that have just started.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    gc.collect()
    gc.freeze()
    use_large_pages()


def pytest_report_header(config: pytest.Config) -> str | None:
    shard = config.option.shard
    return f"shard {shard} of the tests, {datetime.now():%Y-%m-%d %H:%M}" if shard else None


def uses_transformers(item: pytest.Item) -> bool:
    """Such files come last: what they load makes every later fork half as dear again."""
    names = vars(item.module).values() if isinstance(item, pytest.Function) else ()
    return any(getattr(value, "__module__", None) == "tiny_models" for value in names)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if uses_transformers(item) and not sys.modules["tiny_models"].classes.cache_info().currsize:
        sys.modules["tiny_models"].classes()
        make_forks_cheap()
    # Numbers that a test draws are its own: not those of whatever ran before it in this process.
    torch.manual_seed(crc32(item.nodeid.encode()))
    if item.get_closest_marker("peer_memory") and (reason := unordered_reason()):
        pytest.skip(reason)
