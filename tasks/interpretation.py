"""What a trained TFT looked at, as a Parquet file beside its report. Uses pyarrow."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from models.tft.evaluation import Interpretation

SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),  # selection or attention
        ("group", pa.string()),
        ("variable", pa.string()),
        ("horizon_step", pa.int32()),
        ("position", pa.int32()),
        pa.field("weight", pa.float64(), nullable=False),
        ("p10", pa.float64()),
        ("p50", pa.float64()),
        ("p90", pa.float64()),
    ]
)


def interpretation_table(found: Interpretation) -> pa.Table:
    """One row per variable (kind `selection`: mean and percentiles over rows), then one per step ahead and position from
    the origin on (kind `attention`: mean over windows). What a kind does not have is null."""
    names = [(group, name) for group, names in found.names.items() for name in names]
    steps, positions = found.attention.shape
    cells = [(h, p) for h in range(1, steps + 1) for p in range(1 + steps - positions, 1 + steps)]
    weights = [float(x) for group in found.names for x in found.means[group]] + found.attention.ravel().tolist()
    columns = {
        "kind": ["selection"] * len(names) + ["attention"] * len(cells),
        "group": [group for group, _ in names] + [None] * len(cells),
        "variable": [name for _, name in names] + [None] * len(cells),
        "horizon_step": [None] * len(names) + [h for h, _ in cells],
        "position": [None] * len(names) + [p for _, p in cells],
        "weight": weights,
    }
    for index, column in enumerate(("p10", "p50", "p90")):
        columns[column] = [float(x) for group in found.names for x in found.percentiles[group][index]] + [None] * len(cells)
    return pa.table(columns, schema=SCHEMA)


def interpretation_parquet(found: Interpretation) -> bytes:
    """The bytes of `interpretation_table` as Parquet: the same table gives the same bytes, no clock is in them."""
    out = pa.BufferOutputStream()
    pq.write_table(interpretation_table(found), out, version="2.6", compression="zstd", compression_level=3)
    return out.getvalue().to_pybytes()
