#!/bin/sh
# Random secrets for compose.yaml, into deployments/secrets; what is there is kept.
set -eu
umask 077
cd "$(dirname "$0")"
mkdir -p secrets
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
[ -s secrets/database_password ] || random > secrets/database_password
if [ ! -s secrets/s3_keys.json ]; then
    access=$(random) secret=$(random)
    printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$access" "$secret" > secrets/s3_credentials
    printf '{"identities": [{"name": "forecastle", "credentials": [{"accessKey": "%s", "secretKey": "%s"}],
  "actions": ["Admin", "Read", "List", "Tagging", "Write"]}]}\n' "$access" "$secret" > secrets/s3_keys.json
fi
# The containers' user reads them
chmod 644 secrets/*
