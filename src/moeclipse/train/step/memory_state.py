"""The memory of a model between steps: begun, turned, saved and read with the run (`model/segment_memory`).

A checkpoint holds it as logical tensors `memory/LAYER` [batch_size, positions, d_model], row by row of the
batch: a resumed run, in any layout and with any number of microbatches, goes on with the text it was reading.
After a step that was skipped nothing is kept: what a bad step computed must not be attended to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moeclipse.comm.mesh import Mesh
from moeclipse.model.segment_memory import LayerMemory
from moeclipse.train.checkpoints.checkpoint import Checkpoint, Piece
from moeclipse.train.data.samples import Batches


def begin_step(memories: Sequence[LayerMemory], continues: bool) -> None:
    """Where the text does not go on, nothing is remembered."""
    for memory in memories:
        if not continues:
            memory.forget()


def end_step(memories: Sequence[LayerMemory], *, skipped: bool) -> None:
    for memory in memories:
        memory.turn(keep=not skipped)


def memory_pieces(memories: Sequence[LayerMemory], batches: Batches) -> Iterator[Piece]:
    """What this rank's samples left, as pieces of logical tensors."""
    for memory in memories:
        for (microbatch, first), past, row in memory.kept():
            width = past.x_TD.shape[1]
            begin = batches.rows(microbatch)[0] + first
            yield Piece(
                name=f"memory/{memory.layer}",
                shape=(batches.batch_size, past.positions, width),
                start=(begin * past.positions + row) * width,
                data=past.x_TD.flatten(),
            )


def load_memory(
    memories: Sequence[LayerMemory], batches: Batches, mesh: Mesh, checkpoint: Checkpoint
) -> None:
    """Each rank reads the rows of its own samples."""
    for memory in memories:
        memory.turn(keep=False)
        name = f"memory/{memory.layer}"
        if name not in checkpoint:
            continue  # saved where the text began
        _, positions, width = checkpoint.shape(name)
        size = positions * width
        for microbatch in range(batches.accumulate):
            begin, first, stop = batches.rows(microbatch, mesh.data_index, mesh.num_data)
            flat = checkpoint.read(name, (begin + first) * size, (begin + stop) * size)
            kept_BMD = flat.view(stop - first, positions, width).to(mesh.device)
            memory.put((microbatch, first), kept_BMD)
