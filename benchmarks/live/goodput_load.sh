#!/usr/bin/env bash
# Runs goodput_load.py on the GPU rig (see setup_rig.sh).
#   benchmarks/live/goodput_load.sh BUNDLE [BUNDLE2 OUT [ATTENTION] [BUDGET] [EXTRA...]]
# BUNDLE2 holds what the controller needs beside BUNDLE: wheels, and archives of unpacked ones (*.tar.xz).
# BUDGET is the seconds of the whole call (default 580). EXTRA goes to goodput_load.py (--sglang, --seconds N).
# OUT gets goodput_load.json (written after each cell), logs.tar.xz with all steps, and caches.tar.xz if new.
# BUNDLE alone only unpacks it: for a first call, where one call cannot bring both.
set -uo pipefail
bundle="$1"; bundle2="${2:-}"; out="${3:-}"; attention="${4:-triton}"; budget="${5:-580}"; shift "$(( $# < 5 ? $# : 5 ))"
SECONDS=0
. "$(dirname "$0")/setup_rig.sh"
[ -n "$out" ] || { echo "unpacked to $root"; exit 0; }
raw="$root/goodput-$attention"; extra="$root/extra"
rm -rf "$raw"; mkdir -p "$raw" "$out"
if [ ! -d "$extra" ]; then
  mkdir "$extra"
  for wheel in "$bundle2"/*.whl; do python3 -m zipfile -e "$wheel" "$extra"; done
  for archive in "$bundle2"/*.tar.xz; do tar xf "$archive" -C "$extra"; done
fi
export PYTHONPATH="$root/specpilot:$extra:$root/site"
python3 -c 'import specpilot.controller.cli, specpilot.controller.trace.writer' || { echo "the controller cannot start, see above"; exit 1; }
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm --format=csv
left=$(( budget - SECONDS ))
timeout -k 5 "$(( left - 10 ))" python3 "$here/goodput_load.py" run --models "$root/models" --raw "$raw" \
  --out "$out/goodput_load.json" --attention "$attention" --limit "$(( left - 35 ))" "$@" 2>&1 | cut -c1-500
status="${PIPESTATUS[0]}"; echo "exit $status at $SECONDS s"
[ "$status" = 0 ] || tail -n 30 "$raw/engine.log" | cut -c1-250
grep -aE 'Error|specpilot:' "$raw/engine.log" | cut -c1-250 | tail -n 8
tail -n 5 "$raw/controller.log" | cut -c1-250
tar cf - -C "$raw" . | xz -1 -T0 > "$out/logs.tar.xz"
[ -f "$bundle/caches.tar.xz" ] || (cd "$HOME" && tar cf - .cache/flashinfer .triton/cache .cache/tvm-ffi 2>/dev/null | xz -6 -T0 > "$out/caches.tar.xz")
