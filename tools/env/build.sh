#!/usr/bin/env bash
# build.sh NAME: makes the virtual environment ${INT4MOE_ENVS:-~/.cache/int4moe-envs}/NAME from tools/env/NAME.txt and
# common.txt, then NAME.nodeps.txt (without dependencies) where there is one, or keeps the environment that is there when
# it was made from the same pins. Prints its python on the last line.
# PYTHON names the interpreter (default python3); pip's own settings (PIP_INDEX_URL, ...) apply.
set -euo pipefail
name=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
envs=${INT4MOE_ENVS:-$HOME/.cache/int4moe-envs}
python=${PYTHON:-python3}
root=$envs/$name
pins=("$here/$name.txt" "$here/common.txt")
nodeps=()
[[ -f $here/$name.nodeps.txt ]] && nodeps=("$here/$name.nodeps.txt")

"$here/../need-packages.sh"
mkdir -p "$envs"
exec 9>"$envs/.$name.lock"
flock 9 # two builds of one environment would write into the same folder

key=$({ "$python" -c 'import sys; print(sys.version, sys.platform)'; cat "${pins[@]}" "${nodeps[@]}"; } | sha256sum | cut -d' ' -f1)
if [[ -x $root/bin/python && $(cat "$root/.key" 2>/dev/null) == "$key" ]]; then
  echo "$name: reusing $root" >&2
else
  echo "$name: building $root (several GB)" >&2
  rm -rf "$root"
  "$python" -m venv "$root"
  pip=("$root/bin/python" -m pip install --no-cache-dir --disable-pip-version-check -q)
  "${pip[@]}" -r "${pins[0]}" -r "${pins[1]}" >&2
  for file in "${nodeps[@]}"; do "${pip[@]}" --no-deps -r "$file" >&2; done
  printf '%s' "$key" >"$root/.key" # last: a build that was cut short has no key
fi
echo "$root/bin/python"
