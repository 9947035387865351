#!/usr/bin/env bash
# Prints the training commands of a sweep, one per line; see --help. The program is sweep.py.
exec python3 "$(dirname "$0")/sweep.py" "$@"
