"""Starting ranks on this machine, being one of them, and telling who failed.

Torch's elastic agent starts, watches and restarts the ranks; this file gives it a rendezvous that listens
on loopback alone (torch's own would listen on every interface, and the store has no authorization), keeps
its log lines away from the user, and finds the rank that failed first.

A rank that fails writes its error to the file that the agent named for it. The others usually fail an
instant later because their peer left, so the first process that the agent sees die is often a victim:
`root_cause` reads all files and prefers an error that is not about a lost peer.

Whoever is asked to leave, by a signal, leaves with a checkpoint (`cli/signals`): ranks end with 0, which no
agent takes for a failure, and leave their words in the same files; the launcher, and a rank that nobody
launched, end with 75.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from moeclipse.cli.display import make_observer
from moeclipse.cli.failures import (
    Failure,
    await_culprit,
    describe,
    read_failures,
    root_cause,
    show_failure,
    write_failure,
)
from moeclipse.cli.launcher_folder import launcher_folder
from moeclipse.cli.page_line import tell_page
from moeclipse.cli.pin import pin_rank
from moeclipse.cli.seats import DEVICES, ROOM, SEATS, Seats
from moeclipse.cli.signals import Leaving, passing_on
from moeclipse.cli.stopped_ranks import ending_frozen_ranks
from moeclipse.core.config import to_toml
from moeclipse.core.errors import CommError, Preempted
from moeclipse.core.program import command
from moeclipse.core.shown import say
from moeclipse.train.config import TrainConfig
from moeclipse.train.elastic import layout_for

LAUNCHER = "MOECLIPSE_LAUNCHER"  # process id of the launcher, for its ranks
SECRET = "MOECLIPSE_SECRET"  # known to its ranks alone (`comm/start`, which needs torch)
INTERRUPTED = 128 + signal.SIGINT
# --- being a rank ----------------------------------------------------------------------------------------


def run_rank(config: TrainConfig, resume: str) -> int:
    """Train as the rank that the environment names (one rank when it names none)."""
    rank = int(os.environ.get("RANK", "0"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt > 0:
        resume = resume_again(config, resume, attempt, first=rank == 0)
    launched = LAUNCHER in os.environ
    if launched and config.parallel.pin == "auto":
        pin_rank(os.environ, usable_cores())
    observer = make_observer()
    with Leaving(int(os.environ.get(LAUNCHER, "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))) as leaving:
        try:
            if rank == 0:
                observer.phase("importing torch")
            from moeclipse.comm.start import RankPlace, device_settings
            from moeclipse.train.run.trainer import train

            place, parallel = RankPlace.read(), config.parallel
            if place.num_ranks > 1:  # under torchrun, too
                wanted = device_settings(
                    place, pp=parallel.pp, deadline_s=parallel.deadline_s, backend=parallel.backend
                )
                os.environ |= unless_set(wanted, os.environ)
            watching = observer if rank == 0 else None
            summary = train(
                config,
                resume=resume,
                observer=watching,
                leave=leaving.listen,
                leave_at_save=rank_can_join,
                stuck=end_stuck_rank,
            )
            if rank == 0 and summary and summary.get("directory"):
                tell_page(Path(summary["directory"]), observer.console)
        except Preempted as error:
            write_failure(describe(error, rank))
            observer.close()
            if not launched and rank == 0:
                say(str(error), error=True)
            return 0 if "TORCHELASTIC_RUN_ID" in os.environ else error.code
        except KeyboardInterrupt:
            observer.close()
            if not launched and rank == 0:
                show_interrupted(config)
            return leaving.status
        except Exception as error:
            failure = describe(error, rank)
            write_failure(failure)
            if failure.victim and not failure.late:
                await_culprit()
            observer.close()
            if not launched:
                show_failure(failure, named="RANK" in os.environ)
            if failure.victim:
                end_at_once(failure.code)
            return failure.code
    return 0


def rank_can_join() -> bool:
    """Whether the launcher could start more ranks than there are."""
    return ROOM in os.environ and os.path.exists(os.environ[ROOM])


def end_at_once(status: int) -> None:
    """Without taking connections apart: a transport whose peer stands still ends the process with words of
    its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_stuck_rank(error: CommError) -> None:
    """On another thread: a call of CUDA or NCCL holds the main one."""
    failure = describe(error, int(os.environ.get("RANK", "0")))
    write_failure(failure)
    if LAUNCHER not in os.environ:
        show_failure(failure, named=True)
    os._exit(failure.code)


def resume_again(config: TrainConfig, resume: str, attempt: int, first: bool) -> str:
    """What a restarted attempt resumes: this run's own checkpoints, once it has written any."""
    run = run_folder(config)
    if resume in ("off", "auto") or has_checkpoint(run):
        return "auto"
    # It began from another run's checkpoint and has none of its own: it begins there again, in a new folder.
    if first and run.exists():
        run.rename(run.with_name(f"{run.name}.attempt-{attempt - 1}"))
    return resume


def run_folder(config: TrainConfig) -> Path:
    return Path(config.run.dir) / config.run.name


def has_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob("step-*"))


def show_interrupted(config: TrainConfig) -> None:
    run = run_folder(config)
    again = command("train", run / "config.toml", "--resume", "auto")
    say("interrupted" + (f"; go on with: {again}" if has_checkpoint(run) else ""), error=True)


# --- starting ranks --------------------------------------------------------------------------------------


def launch_ranks(
    config: TrainConfig, resume: str, *, num_ranks: int, restarts: int = 0, numbers: Sequence[int] = ()
) -> int:
    """Start ranks here, wait for them, and return the exit status of the run.

    `numbers` of ranks with which the run may go on once some are lost; none: with all or not at all.
    """
    with launcher_folder() as folder, quiet_elastic():
        file = folder / "config.toml"

        def settle(ranks: int) -> None:
            file.write_text(to_toml(layout_for(config, ranks, num_ranks)))

        settle(num_ranks)
        make_observer().phase(f"starting {num_ranks} ranks")
        with as_launcher(num_ranks):
            seats = None
            if numbers:
                saves, cuda = run_folder(config) / "checkpoints", uses_cuda(config)
                seats = Seats(numbers, folder, saves, cuda=cuda, settle=settle)
            words = ["train", str(file), "--resume", resume]
            code = _run_agent(words, folder, num_ranks, restarts, seats)
        if code == INTERRUPTED:
            show_interrupted(config)
        return code


def launch_words(words: list[str], num_ranks: int) -> int:
    """Start ranks that run another command, and wait for them."""
    with launcher_folder() as folder, quiet_elastic(), as_launcher(num_ranks):
        return _run_agent(words, folder, num_ranks, 0)


@contextlib.contextmanager
def as_launcher(num_ranks: int) -> Iterator[None]:
    """What ranks are started with."""
    before = {name: os.environ.get(name) for name in (LAUNCHER, SECRET, SEATS, ROOM, DEVICES)}
    os.environ |= {LAUNCHER: str(os.getpid()), SECRET: secrets.token_hex(32)}
    os.environ |= child_environment(num_ranks, os.environ)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


def child_environment(num_ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What ranks on one machine need, unless the user has set it."""
    wanted = {
        "OMP_NUM_THREADS": str(max(usable_cores() // num_ranks, 1)),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # Torch warns of every communicator that a pair of stages opens, which is meant; errors still show.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return unless_set(wanted, environment)


def unless_set(wanted: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if name not in environment}


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the container's quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(round(int(quota) / int(period)), 1))
    return cores


def uses_cuda(config: TrainConfig) -> bool:
    if config.run.device != "auto":
        return config.run.device == "cuda"
    import torch

    return torch.cuda.is_available()


def _run_agent(
    words: list[str], folder: Path, num_ranks: int, restarts: int, seats: Seats | None = None
) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException

    from moeclipse.cli.rendezvous import Agent, NotRestarted, RankFiles
    from moeclipse.train.run.incidents import kept_by_launcher

    files = RankFiles(str(folder / "ranks"), restarts)
    command = [sys.executable, "-m", "moeclipse", *words]
    agent = Agent(folder.name, command, files, num_ranks=num_ranks, restarts=restarts, seats=seats)
    # The others are passed on to the ranks, which save.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"

    def end(number: int) -> None:
        raise SignalException(f"a second signal: {number}", signal.Signals(number))

    try:
        with passing_on(end) as asked, ending_frozen_ranks(lambda: bool(read_failures(files.newest))):
            files.asked = asked
            failed = cast(Any, agent.run()).is_failed()  # torch's decorator hides its type
        written = read_failures(files.newest)
        if not failed:
            return show_farewell(written, asked())
        if asked() and all(failure.victim for failure in written):
            return 128 + asked()
        failure = root_cause(written, files.codes)
        if failure not in written:  # who was killed leaves no word
            kept_by_launcher(files.newest, failure.rank, failure.text)
    except NotRestarted as error:
        failure = error.failure
    except SignalException as error:
        return 128 + int(error.sigval)
    if failure.code != INTERRUPTED:
        show_failure(failure, named=not failure.text.startswith(f"rank {failure.rank} "))
    return failure.code


def show_farewell(written: list[Failure], asked: int = 0) -> int:
    """The status of ranks that all ended well: with a checkpoint before the end, where they were asked to.

    `asked`: the signal that came here; ranks were told of it by SIGTERM, whatever it was.
    """
    left = [failure for failure in written if failure.code == Preempted.code]
    if not left:
        return 0
    name = signal.Signals(asked or signal.SIGTERM).name
    say(left[0].text.replace("(SIGTERM)", f"({name})", 1), error=True)
    return Preempted.code


@contextlib.contextmanager
def quiet_elastic() -> Iterator[None]:
    """Hide the agent's log lines (LOGLEVEL=INFO shows them): what matters of them is told by us."""
    before = logging.root.manager.disable
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
