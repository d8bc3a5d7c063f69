#!/usr/bin/env bash
# The environment of the onednn backend (about 3.5 GB); see tools/env/build.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/env/build.sh" onednn
