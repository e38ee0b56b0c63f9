"""A file system that is really full: training goes on without metrics and checkpoints, as long as it can."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {above!r}]
from test_trainer import Notes, configure
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import CheckpointError
from moeclipse.train.run.trainer import Run

folder, disk = Path(sys.argv[1]), Path(sys.argv[2])
values = {{"run.dir": str(disk), "run.steps": 8, "checkpoint.asynchronous": False}}
config = with_values(configure(folder), values)


class Filler(Notes):
    \"\"\"Fills the disk after step 2 and makes room after step 5, where it is told to.\"\"\"

    def step(self, record):
        if record["step"] == 2:
            with open(disk / "filler", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
        if record["step"] == 5 and sys.argv[3] == "room":
            (disk / "filler").unlink()
        self.seen = record["step"]


notes = Filler()
try:
    Run(config, Mesh.single(), notes).whole("off")
    print("ended well")
except CheckpointError as error:
    print(f"ended: {{error}}")
print("last step", notes.seen)
for text in notes.texts:
    print("note:", text)
"""


def on_a_small_disk(tmp_path: Path, how: str) -> str:
    """What a run says whose directory lies on a tmpfs of 2 MB, in a mount namespace of its own."""
    here = Path(__file__).parent
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(here / "run"), above=str(here.parent)))
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = (
        ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    )
    mount = f"mount -t tmpfs -o size=2m tmpfs {disk}"
    tried = subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {tried.stderr.strip()}")
    command = f"{mount} && exec {sys.executable} {script} {tmp_path} {disk} {how}"
    done = subprocess.run([*unshare, "sh", "-c", command], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_run_goes_on_and_saves_again_when_there_is_room(tmp_path: Path) -> None:
    out = on_a_small_disk(tmp_path, "room")
    assert "ended well\nlast step 7\n" in out, out
    assert "checkpoint step 4 could not be saved" in out
    assert "checkpoint step 2 is intact" in out
    assert "training goes on" in out
    assert "load.npz cannot be written: no space left on device; training goes on without" in out
    assert "load.npz can be written again" in out


@pytest.mark.full
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_disk_that_stays_full_ends_the_run_at_its_end(tmp_path: Path) -> None:
    out = on_a_small_disk(tmp_path, "none")
    assert "ended: checkpoint step 4 could not be saved" in out, out
    assert "last step 7" in out
