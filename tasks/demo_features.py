"""Demo data that are real: daily bars of five shares (PyPI package bokeh-sampledata, public domain), turned into the
contract's 5 static, 210 historical and 10 future columns. Strictly causal: a historical value of row t uses rows <= t
only, a future value only the timestamp. Uses pandas."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

SHARES = ("AAPL", "FB", "GOOG", "IBM", "MSFT")
WARMUP_BARS = 121
WINDOWS = (2, 3, 5, 8, 10, 15, 20, 30, 45, 60, 90, 120)
# venue (0 NASDAQ, 1 NYSE) and sector (1 hardware, 2 software, 3 internet) by share
CODES = {"AAPL": (0, 1), "FB": (0, 3), "GOOG": (0, 3), "IBM": (1, 1), "MSFT": (0, 2)}


def read_shares() -> dict[str, pd.DataFrame]:
    """Daily bars by share: timestamp, open, high, low, close (adjusted for splits and dividends), volume."""
    with (files("bokeh_sampledata") / "_data" / "stocks.csv.gz").open("rb") as file:
        table = pd.read_csv(file, compression="gzip")
    table.columns = [c.strip().lower().replace(" ", "_") for c in table.columns]
    out = {}
    for name in SHARES:
        raw = table[table["ticker"] == name].reset_index(drop=True)
        factor = raw["adj_close"] / raw["close"]
        bars = pd.DataFrame({"timestamp": pd.to_datetime(raw["date"])})
        for column in ("open", "high", "low", "close"):
            bars[column] = raw[column] * factor
        bars["volume"] = raw["volume"] / factor
        out[name] = bars.sort_values("timestamp").drop_duplicates("timestamp", keep="last").reset_index(drop=True)
    return out


def _ratio(top: pd.Series, bottom: pd.Series) -> pd.Series:
    """top / bottom, 0 where the denominator is 0; warm-up gaps stay."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = top / bottom
    return quotient.where(np.isfinite(quotient) | top.isna() | bottom.isna(), 0.0)


def _ema(values: pd.Series, span: int) -> pd.Series:
    return values.ewm(span=span, adjust=False).mean()


def _wilder(values: pd.Series, bars: int) -> pd.Series:
    return values.ewm(alpha=1.0 / bars, adjust=False).mean()


def historical_features(bars: pd.DataFrame) -> pd.DataFrame:
    """210 columns from daily bars, float64, row by row from rows <= t. The first WARMUP_BARS rows have gaps."""
    o, h, low, c, v = (bars[n].astype("float64") for n in ("open", "high", "low", "close", "volume"))
    log_close, log_volume = np.log(c), np.log1p(v)
    r = log_close.diff()
    f: dict[str, pd.Series] = {}
    for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 30, 40, 48, 60, 72, 90, 96, 120):
        f[f"return_{k}"] = log_close.diff(k)
    for k in range(1, 21):
        f[f"return_lag_{k}"] = r.shift(k)
    for w in WINDOWS:
        f[f"volatility_{w}"] = r.rolling(w).std()
        f[f"mean_return_{w}"] = r.rolling(w).mean()
        f[f"sma_gap_{w}"] = c / c.rolling(w).mean() - 1
        f[f"ema_gap_{w}"] = c / _ema(c, w) - 1
    for w in WINDOWS[3:]:
        f[f"skewness_{w}"] = r.rolling(w).skew()
        f[f"kurtosis_{w}"] = r.rolling(w).kurt()
    for w in WINDOWS[2:]:
        f[f"price_z_{w}"] = _ratio(c - c.rolling(w).mean(), c.rolling(w).std())
    up, down = c.diff().clip(lower=0), (-c.diff()).clip(lower=0)
    for n in (5, 7, 9, 14, 21, 28, 42, 56):
        f[f"rsi_{n}"] = 100 * _ratio(_wilder(up, n), _wilder(up, n) + _wilder(down, n))
    typical = (h + low + c) / 3
    for n in (5, 9, 14, 21, 28, 60):
        floor, ceiling = low.rolling(n).min(), h.rolling(n).max()
        f[f"stochastic_{n}"] = 100 * _ratio(c - floor, ceiling - floor)
    for n in (10, 14, 20, 30, 50):
        mean = typical.rolling(n).mean()
        f[f"cci_{n}"] = _ratio(typical - mean, 0.015 * (typical - mean).abs().rolling(n).mean())
    before = c.shift(1)
    true_range = pd.concat([h - low, (h - before).abs(), (low - before).abs()], axis=1).max(axis=1)
    for n in (5, 10, 14, 20, 30, 60):
        f[f"atr_{n}"] = _wilder(true_range, n) / c
    for fast, slow, smooth in ((12, 26, 9), (5, 35, 5), (8, 17, 9)):
        macd = (_ema(c, fast) - _ema(c, slow)) / c
        line = _ema(macd, smooth)
        f[f"macd_{fast}_{slow}"], f[f"macd_signal_{fast}_{slow}"] = macd, line
        f[f"macd_gap_{fast}_{slow}"] = macd - line
    for n in (10, 20, 30, 50):
        mean, deviation = c.rolling(n).mean(), c.rolling(n).std()
        f[f"bollinger_place_{n}"] = _ratio(c - (mean - 2 * deviation), 4 * deviation)
        f[f"bollinger_width_{n}"] = 4 * deviation / mean
    for n in (10, 20, 55):
        floor, ceiling = low.rolling(n).min(), h.rolling(n).max()
        f[f"donchian_place_{n}"] = _ratio(c - floor, ceiling - floor)
        f[f"donchian_width_{n}"] = (ceiling - floor) / c
    high_low, close_open = np.log(h / low) ** 2, np.log(c / o) ** 2
    rogers = np.log(h / c) * np.log(h / o) + np.log(low / c) * np.log(low / o)
    for n in (5, 10, 20, 60):
        f[f"parkinson_{n}"] = np.sqrt(high_low.rolling(n).mean().clip(lower=0) / (4 * np.log(2)))
        klass = 0.5 * high_low - (2 * np.log(2) - 1) * close_open
        f[f"garman_klass_{n}"] = np.sqrt(klass.rolling(n).mean().clip(lower=0))
    for n in (10, 20):
        f[f"rogers_satchell_{n}"] = np.sqrt(rogers.rolling(n).mean().clip(lower=0))
    balance = (np.sign(c.diff()).fillna(0) * v).cumsum()
    for n in (10, 20, 60):
        f[f"obv_z_{n}"] = _ratio(balance - balance.rolling(n).mean(), balance.rolling(n).std())
        f[f"vwap_gap_{n}"] = _ratio(c * v.rolling(n).sum(), (typical * v).rolling(n).sum()) - 1
    for n in (5, 10, 20, 60):
        f[f"volume_z_{n}"] = _ratio(log_volume - log_volume.rolling(n).mean(), log_volume.rolling(n).std())
        f[f"up_share_{n}"] = (r > 0).astype("float64").where(r.notna()).rolling(n).mean()
    for n in (1, 5):
        f[f"volume_change_{n}"] = log_volume.diff(n)
    money = typical * v
    inflow, outflow = money.where(typical.diff() > 0, 0.0), money.where(typical.diff() < 0, 0.0)
    for n in (7, 14, 28):
        p, q = inflow.rolling(n).sum(), outflow.rolling(n).sum()
        f[f"money_flow_{n}"] = 100 * _ratio(p, p + q)
    place = _ratio((c - low) - (h - c), h - low)
    for n in (10, 20):
        f[f"chaikin_{n}"] = _ratio((place * v).rolling(n).sum(), v.rolling(n).sum())
    f["bar_range"], f["bar_body"], f["bar_gap"] = (h - low) / c, (c - o) / c, np.log(o / before)
    f["bar_upper"], f["bar_lower"] = (h - np.maximum(o, c)) / c, (np.minimum(o, c) - low) / c
    rise, fall = h.diff(), -low.diff()
    plus = _ratio(_wilder(rise.where((rise > fall) & (rise > 0), 0.0), 14), _wilder(true_range, 14)) * 100
    minus = _ratio(_wilder(fall.where((fall > rise) & (fall > 0), 0.0), 14), _wilder(true_range, 14)) * 100
    f["di_plus_14"], f["di_minus_14"] = plus, minus
    f["adx_14"] = _wilder(100 * _ratio((plus - minus).abs(), plus + minus), 14)
    for n in (20, 60):
        lagged = r.shift(1)
        covariance = (r * lagged).rolling(n).mean() - r.rolling(n).mean() * lagged.rolling(n).mean()
        f[f"autocorrelation_{n}"] = _ratio(covariance, r.rolling(n).std() * lagged.rolling(n).std()).clip(-2, 2)
    for n in (20, 60, 120):
        f[f"drawdown_{n}"] = c / c.rolling(n).max() - 1
    sign = np.sign(r).fillna(0)
    f["streak"] = sign * (sign.groupby((sign != sign.shift()).cumsum()).cumcount() + 1)
    f["log_turnover"] = np.log1p(v * c)
    return pd.DataFrame({f"hist_{name}": values for name, values in f.items()}, index=bars.index)


def future_features(timestamps: pd.Series) -> pd.DataFrame:
    """10 calendar columns, functions of the timestamp alone."""
    t = pd.DatetimeIndex(timestamps)
    turn = 2 * np.pi
    hour, week, day, month = t.hour + t.minute / 60, t.day_of_week, t.day - 1, t.month - 1
    columns = {
        "hour_sin": np.sin(turn * hour / 24), "hour_cos": np.cos(turn * hour / 24),
        "weekday_sin": np.sin(turn * week / 7), "weekday_cos": np.cos(turn * week / 7),
        "day_sin": np.sin(turn * day / 31), "day_cos": np.cos(turn * day / 31),
        "month_sin": np.sin(turn * month / 12), "month_cos": np.cos(turn * month / 12),
        "month_end": t.is_month_end.astype("float64"),
        "years_since_2000": (t - pd.Timestamp("2000-01-01")) / pd.Timedelta(days=365.25),
    }  # fmt: skip
    return pd.DataFrame({f"fut_{name}": np.asarray(values) for name, values in columns.items()}, index=timestamps.index)


def share_features(name: str, bars: pd.DataFrame) -> pd.DataFrame:
    """The contract's columns of one share, warm-up left out. `target` is the price, beside it the log return in percent
    and the log of the bar's Garman-Klass volatility."""
    klass = 0.5 * np.log(bars.high / bars.low) ** 2 - (2 * np.log(2) - 1) * np.log(bars.close / bars.open) ** 2
    venue, sector = CODES[name]
    static = {"asset_class": 0, "venue": venue, "sector": sector, "bar_minutes": 1440, "log10_tick": -2}
    table = pd.concat(
        [
            pd.DataFrame(
                {
                    "entity_id": name, "timestamp": bars.timestamp, "price": bars.close, "target": bars.close,
                    "target_logret": 100 * np.log(bars.close).diff(),
                    "target_logvol": np.log(np.sqrt(klass.clip(lower=1e-12))),
                }
            ),
            pd.DataFrame({f"static_{k}": np.full(len(bars), x, "float32") for k, x in static.items()}),
            historical_features(bars).astype("float32"),
            future_features(bars.timestamp).astype("float32"),
        ],
        axis=1,
    )  # fmt: skip
    return table.iloc[WARMUP_BARS:].reset_index(drop=True)


def write_demo_features(folder: Path) -> list[Path]:
    """Write one Parquet file per share into `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, bars in read_shares().items():
        features = share_features(name, bars)
        features["timestamp"] = features["timestamp"].dt.tz_localize("UTC").astype("datetime64[us, UTC]")
        paths.append(folder / f"{name}.parquet")
        pq.write_table(
            pa.Table.from_pandas(features, preserve_index=False), paths[-1], compression="zstd",
            use_dictionary=["entity_id"], write_page_checksum=True,
        )  # fmt: skip
    return paths
