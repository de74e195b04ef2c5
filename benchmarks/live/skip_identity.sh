#!/usr/bin/env bash
# Runs skip_identity.py on the GPU rig (see setup_rig.sh): a queue of engines for each GPU, at once.
#   benchmarks/live/skip_identity.sh BUNDLE OUT SECONDS QUEUE...
# A QUEUE is "RUN; RUN; ...", a RUN "ATTENTION ARM [OPTIONS]" as skip_identity.py takes them. All of it:
#   skip_identity.sh BUNDLE OUT 560 "triton none; triton skip; triton cost" "fa3 none; fa3 skip; fa3 cost"
# The trained pair is in BUNDLE/pair.tar.xz (train_pair.sh makes it), or unpacked already.
# SECONDS is the budget of the whole call. OUT gets skip_identity.json, logs.tar.xz (raw files too),
# and caches.tar.xz if new.
set -uo pipefail
bundle="$1"; out="$2"; budget="$3"; shift 3
SECONDS=0
. "$(dirname "$0")/setup_rig.sh"
raw="$root/identity"; rm -rf "$raw"; mkdir -p "$raw" "$out"
merge() { python3 "$here/skip_identity.py" merge --raw "$raw" --out "$out/skip_identity.json"; }
one() {  # GPU, attention, arm, further options
  local gpu="$1" attention="$2" arm="$3"; shift 3
  local left=$(( budget - SECONDS ))
  [ "$left" -lt 80 ] && { echo "$attention $arm $*: no time left"; return 1; }
  CUDA_VISIBLE_DEVICES="$gpu" timeout -k 5 "$left" python3 "$here/skip_identity.py" run --pair "$root/pair" \
    --models "$root/models" --attention "$attention" --arm "$arm" --raw "$raw" --seconds "$(( left - 30 ))" "$@" 2>&1 | cut -c1-600
  echo "$attention $arm $*: exit ${PIPESTATUS[0]} at $SECONDS s"
  merge > /dev/null  # what there is, should the machine go away
}
queue() {  # GPU, runs
  local runs run
  IFS=';' read -ra runs <<< "$2"
  for run in "${runs[@]}"; do one "$1" $run; done
}
[ -f "$root/pair/prompts.json" ] || { echo "no trained pair: BUNDLE needs pair.tar.xz"; exit 1; }
nvidia-smi --query-gpu=name,driver_version --format=csv
gpu=0
for runs in "$@"; do queue "$gpu" "$runs" & gpu=$(( gpu + 1 )); done
wait
merge
for log in "$raw"/*.log; do echo "== $log"; grep -aE 'Error|specpilot:' "$log" | cut -c1-300 | tail -n 6; done
tar cJf "$out/logs.tar.xz" -C "$raw" .
[ -f "$bundle/caches.tar.xz" ] || (cd "$HOME" && tar cf - .cache/flashinfer .triton/cache .cache/tvm-ffi 2>/dev/null | xz -6 -T0 > "$out/caches.tar.xz")
