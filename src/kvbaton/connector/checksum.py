"""Checksum: CRC-32 of KV blocks where they lie, for verified handoffs."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvbaton.kv.layout import Layout

BlockChecksum = Callable[[int, npt.NDArray[np.int64]], bytes]


def block_checksum(layout: Layout, storages: Sequence[Any]) -> BlockChecksum:
    """Make a function of (group, block ids) to CRC-32 values, block-major, little-endian uint32.

    Args:
        layout: the regions.
        storages: the untyped storages they lie in.
    """
    views = [(region.group, _view(region, layout.num_blocks, storages)) for region in layout.regions]

    def checksum(group: int, ids: npt.NDArray[np.int64]) -> bytes:
        index = torch.from_numpy(np.ascontiguousarray(ids))
        columns = []
        for region_group, view in views:
            if region_group == group:
                rows = view[index.to(view.device)].cpu().numpy()
                columns.append([zlib.crc32(row) for row in rows])
        return np.asarray(columns, "<u4").T.tobytes()

    return checksum


def _view(region: Any, num_blocks: int, storages: Sequence[Any]) -> Any:
    """A region's blocks as bytes, shape (num_blocks, block_bytes), without copying."""
    storage = next(s for s in storages if s.data_ptr() <= region.base < s.data_ptr() + s.nbytes())
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    offset = region.base - storage.data_ptr()
    return torch.as_strided(whole, (num_blocks, region.block_bytes), (region.stride_bytes, 1), offset)
