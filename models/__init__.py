"""What we know: the two networks, their training and the files they leave. No Prefect, no DuckDB, no S3."""
