"""What happens in which order; one file per flow."""

import tasks  # noqa: F401  # sets Prefect's defaults, before any flow imports Prefect
