"""From Parquet to forecast: what a source says after the forecast's start changes nothing."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import market_tables, small_contract
from test_tft import forecast_of, off_by_one

from models.config import IngestConfig
from tasks.series import series_from_staged
from tasks.staging import stage_parquet

ORIGIN = 80
CONTRACT = small_contract()
HISTORICAL = [n for n in CONTRACT.columns if n.startswith("hist_")]


def series_of(table, folder):
    folder.mkdir()
    pq.write_table(table, folder / "part.parquet")
    return series_from_staged(stage_parquet(str(folder), CONTRACT, IngestConfig(), folder / "staged"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same Parquet source three times: as it is, and with one kind of column changed after the origin."""
    table = market_tables({"AAA": 120}, static=3, historical=20, future=4)["AAA"]
    random = np.random.default_rng(5)
    out = {"plain": table}
    for kind, names in {"target and price": ["target", "price"], "historical": HISTORICAL}.items():
        changed = table
        for name in names:
            values = table[name].to_numpy().copy()
            values[ORIGIN + 1 :] = np.abs(random.normal(50, 20, 119 - ORIGIN)) + 1
            field = table.schema.field(name)
            changed = changed.set_column(table.schema.names.index(name), field, pa.array(values, field.type))
        out[kind] = changed
    root = tmp_path_factory.mktemp("sources")
    return {kind: series_of(table, root / kind) for kind, table in out.items()}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("gradient_checkpointing", ["none", "full"])
def test_rows_after_the_origin_in_the_parquet_change_no_forecast(sources, mode, gradient_checkpointing):
    wanted = forecast_of(sources["plain"], ORIGIN, mode, gradient_checkpointing)
    for kind in ("target and price", "historical"):
        assert np.array_equal(wanted, forecast_of(sources[kind], ORIGIN, mode, gradient_checkpointing)), kind


def test_an_off_by_one_planted_in_the_windows_is_caught(sources):
    with off_by_one():
        wanted = forecast_of(sources["plain"], ORIGIN, "eval", "none")
        assert not np.array_equal(wanted, forecast_of(sources["historical"], ORIGIN, "eval", "none"))
