#!/usr/bin/env bash
# The environment with the formats' own libraries (about 2 GB); see tools/env/build.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/env/build.sh" formats
