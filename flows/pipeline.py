"""The whole job: ingest, then train and publish both models, by calling the three flows."""

from __future__ import annotations

from prefect import flow
from pydantic import BaseModel, ConfigDict

from flows.ingest import IngestReport, ingest
from flows.retrain_dqn import retrain_dqn
from flows.retrain_tft import retrain_tft
from models.config import IngestConfig
from models.dqn.config import DQNConfig
from models.tft.config import TFTConfig
from tasks.retraining import RetrainReport
from tasks.run_record import stop_crash_loop


class PipelineReport(BaseModel):
    """The dataset and the two published models."""

    model_config = ConfigDict(frozen=True)
    ingest: IngestReport
    tft: RetrainReport
    dqn: RetrainReport

    def for_people(self) -> str:
        """What was ingested and published, for a terminal."""
        data = f"dataset {self.ingest.fingerprint[:12]}: {self.ingest.rows} rows, {len(self.ingest.series)} series"
        return "\n".join((data, self.tft.for_people(), self.dqn.for_people()))


@flow(name="pipeline", flow_run_name="pipeline[{source}]")
def pipeline(
    source: str,
    store: str | None = None,
    contract: str | None = None,
    tft: TFTConfig = TFTConfig(),
    dqn: DQNConfig = DQNConfig(),
    ingesting: IngestConfig = IngestConfig(),
) -> PipelineReport:
    """Ingest feature Parquet, train both models on it and publish them.

    Args:
        source: Folder, file or glob of Parquet files.
        store: file:// or s3:// prefix; none takes FORECASTLE_STORE, else this machine's own store.
        contract: TOML file with the feature contract; none finds 5 static, 210 historical and 10 future columns by prefix.
        tft: How the forecaster learns.
        dqn: How the trading agent learns.
        ingesting: How to ingest.
    """
    stop_crash_loop()
    data = ingest(source, store, contract, ingesting)
    return PipelineReport(
        ingest=data,
        tft=retrain_tft(data.dataset, store, config=tft),
        dqn=retrain_dqn(data.dataset, store, config=dqn),
    )
