"""What runs where and when, and the set-ups that serve it."""

import tasks  # noqa: F401  # sets Prefect's defaults, before anything here imports Prefect
