"""Predict: new rows in, forecasts or actions out."""

from __future__ import annotations

import tempfile
from pathlib import Path

from prefect import flow
from prefect.events import emit_event
from pydantic import BaseModel, ConfigDict

from tasks import default_store
from tasks.prediction import predict_rows
from tasks.run_record import stop_crash_loop
from tasks.storage import digest, open_store


class PredictReport(BaseModel):
    """Which version made how many rows, and where they are."""

    model_config = ConfigDict(frozen=True)
    model: str
    version: int
    rows: int
    out: str


@flow(name="predict", flow_run_name="predict[{model}]")
def predict(
    model: str, source: str, out: str | None = None, store: str | None = None, version: int | None = None
) -> PredictReport:
    """Forecast, or decide, with a published model and write the rows to a Parquet file.

    Args:
        model: Name of the model, such as tft or dqn.
        source: Folder, file or glob of Parquet files with the model's contract.
        out: Parquet file to write; none keeps it in the store, under predictions/<model>/<version>/ and its sha256.
        store: file:// or s3:// prefix; none takes FORECASTLE_STORE, else this machine's own store.
        version: Version to use; none is the champion.
    """
    stop_crash_loop()
    opened = open_store(default_store(store))
    with tempfile.TemporaryDirectory(prefix="forecastle-") as folder:
        path = Path(out) if out else Path(folder) / "predictions.parquet"
        manifest, rows = predict_rows(opened, model, version, source, path)
        if out is None:
            file = digest(path)
            key = f"predictions/{model}/{manifest.version}/{file.sha256}.parquet"
            opened.put_if_absent(key, path, file)
            out = f"{opened.uri.rstrip('/')}/{key}"
    emit_event(
        "predictions.landed",
        resource={"prefect.resource.id": f"model.{model}"},
        payload={"model": model, "version": manifest.version, "rows": rows, "out": out},
    )
    return PredictReport(model=model, version=manifest.version, rows=rows, out=out)
