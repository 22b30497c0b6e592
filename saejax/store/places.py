"""Where in a store the rows of a batch lie: the order read backwards, to find the rows that spoiled a step."""

import numpy as np

from saejax.store.order import EpochOrder


def places(order: EpochOrder, batch_size: int, step: int) -> dict[str, np.ndarray]:
    """epoch, block, chunk and row (of the store, in stored order) of every row of the batch of `step`, int64 [B] each.

    Pure arithmetic: nothing is read.
    """
    stream_B = np.arange(step * batch_size, (step + 1) * batch_size)
    epoch_B, within_B = np.divmod(stream_B, order.n_rows)
    block_B, offset_B = np.divmod(within_B, order.block_rows)
    chunk_B = np.empty_like(stream_B)
    row_B = np.empty_like(stream_B)
    for epoch, block in {*zip(epoch_B.tolist(), block_B.tolist(), strict=True)}:
        here = (epoch_B == epoch) & (block_B == block)
        which, inside = np.divmod(order.row_order(epoch, block)[offset_B[here]], order.chunk_rows)
        chunk_B[here] = order.chunks(epoch, block)[which]
        row_B[here] = chunk_B[here] * order.chunk_rows + inside
    return {"epoch": epoch_B, "block": block_B, "chunk": chunk_B, "row": row_B}
