#!/usr/bin/env bash
# One process of a run, whatever launcher starts it: the run begins, or goes on from its last checkpoint.
#   RUN      folder of the run, which all machines see
#   DEVICES  replicas to go on with, if there are fewer machines than before
set -euo pipefail
if [ -z "${RUN:-}" ]; then
    echo "error: RUN: must be a folder that all machines see" >&2
    exit 2
fi
if [ -e "$RUN/config.json" ]; then
    exec python -m jaxddp.train --resume "$RUN" ${DEVICES:+--devices "$DEVICES"}
fi
exec python -m jaxddp.train --output "$RUN" "$@"
