#!/usr/bin/env bash
# Runs skip_identity.py on the GPU rig (see setup_rig.sh): one attention backend a GPU, at once.
#   benchmarks/live/skip_identity.sh BUNDLE OUT [BACKENDS] [SECONDS] [EXTRA...]
# BUNDLE must hold pair.tar.xz (train_pair.sh makes it). BACKENDS: "triton fa3", default "triton".
# SECONDS is the budget of the whole call (default 560). EXTRA goes to the engine with the plugin:
# --no-overlap, --tree, --parts greedy,resume,switches,sampled,cost, --label NAME.
# Each backend runs none, then skip, then the cost of resuming on an 8B model if there is time.
# OUT gets skip_identity.json, logs.tar.xz (raw files too), and caches.tar.xz if new.
set -uo pipefail
bundle="$1"; out="$2"; backends="${3:-triton}"; budget="${4:-560}"; shift "$(( $# < 4 ? $# : 4 ))"
SECONDS=0
. "$(dirname "$0")/setup_rig.sh"
raw="$root/identity"; rm -rf "$raw"; mkdir -p "$raw" "$out"
merge() { python3 "$here/skip_identity.py" merge --raw "$raw" --out "$out/skip_identity.json"; }
one() {  # GPU, backend, arm, seconds kept for what follows, further options
  local gpu="$1" backend="$2" arm="$3" reserve="$4"; shift 4
  local left=$(( budget - SECONDS - reserve ))
  [ "$left" -lt 80 ] && { echo "$backend $arm: no time left"; return 1; }
  CUDA_VISIBLE_DEVICES="$gpu" timeout -k 5 "$left" python3 "$here/skip_identity.py" run --pair "$root/pair" \
    --models "$root/models" --attention "$backend" --arm "$arm" --raw "$raw" --seconds "$(( left - 40 ))" "$@" 2>&1 | cut -c1-1000
  echo "$backend $arm: exit ${PIPESTATUS[0]} at $SECONDS s"
  merge > /dev/null  # what there is, should the machine go away
}
backend_runs() {  # GPU, backend, options of the engine with the plugin
  local gpu="$1" backend="$2"; shift 2
  one "$gpu" "$backend" none 220
  one "$gpu" "$backend" skip 5 "$@"
  one "$gpu" "$backend" cost 5
}
[ -f "$root/pair/prompts.json" ] || { echo "no trained pair: BUNDLE needs pair.tar.xz"; exit 1; }
nvidia-smi --query-gpu=name,driver_version --format=csv
gpu=0
for backend in $backends; do backend_runs "$gpu" "$backend" "$@" & gpu=$(( gpu + 1 )); done
wait
merge
for log in "$raw"/*.log; do echo "== $log"; grep -aE 'Error|specpilot:' "$log" | cut -c1-300 | tail -n 8; done
tar cJf "$out/logs.tar.xz" -C "$raw" .
[ -f "$bundle/caches.tar.xz" ] || (cd "$HOME" && tar cf - .cache/flashinfer .triton/cache .cache/tvm-ffi 2>/dev/null | xz -6 -T0 > "$out/caches.tar.xz")
