#!/usr/bin/env bash
# The environment of the ipex backend and of the oldest torch supported (about 7 GB); see tools/env/build.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/env/build.sh" ipex
