#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Run a program; if it dies, run it again with the same variables, at most $REPLACEMENTS times (10 by default).
#
#     torchrun --nproc-per-node 4 --no-python examples/launch/replace.sh python train.py
#
# It ends with the program's exit code, at once if that is 0, 2 (wrong options), 75 (start all ranks again), or that of
# Ctrl-C or SIGTERM.
set -u

left=${REPLACEMENTS:-10}
while true; do
    "$@"
    code=$?
    case $code in
        0 | 2 | 75 | 130 | 143) exit "$code" ;;
    esac
    ((left-- > 0)) || exit "$code"
    echo "replace.sh: exit code $code, starting again ($left more times)" >&2
    sleep 1
done
