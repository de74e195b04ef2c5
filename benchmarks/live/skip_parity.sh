#!/usr/bin/env bash
# Runs skip_parity.py on the GPU rig (see setup_rig.sh): one attention backend a GPU, at once.
#   benchmarks/live/skip_parity.sh BUNDLE OUT [measure|profile] [BACKENDS] [SECONDS] [EXTRA...]
# measure: none, rotate, none one after the other; profile: rotate, none. BACKENDS: "triton fa3".
# SECONDS is the budget of the whole call (default 560); EXTRA goes to every run (--no-overlap).
# OUT gets skip_parity.json, skip_profile.json when profiling, logs.tar.xz, and caches.tar.xz if new.
set -uo pipefail
bundle="$1"; out="$2"; what="${3:-measure}"; backends="${4:-triton fa3}"; budget="${5:-560}"; shift "$(( $# < 5 ? $# : 5 ))"
SECONDS=0
. "$(dirname "$0")/setup_rig.sh"
raw="$root/parity"; rm -rf "$raw"; mkdir -p "$raw" "$out"
merge() { python3 "$here/skip_parity.py" merge --raw "$raw" --out "$out/skip_parity.json" "$@"; }
one() {  # GPU, backend, arm, label, seconds kept for what follows, further options
  local gpu="$1" backend="$2" arm="$3" label="$4" reserve="$5"; shift 5
  local left=$(( budget - SECONDS - reserve ))
  [ "$left" -lt 70 ] && { echo "$backend $label: no time left"; return 1; }
  CUDA_VISIBLE_DEVICES="$gpu" timeout -k 5 "$left" python3 "$here/skip_parity.py" run --models "$root/models" \
    --attention "$backend" --arm "$arm" --label "$label" --raw "$raw" --seconds "$(( left - 15 ))" "$@" 2>&1 | cut -c1-600
  echo "$backend $label: exit ${PIPESTATUS[0]}"
  merge > /dev/null  # what there is, should the machine go away
}
has_cells() { grep -q '"steps": \[\[\|"profiles": \[{' "$raw/$1.json" 2>/dev/null; }
backend_runs() {  # GPU, backend, further options
  local gpu="$1" backend="$2"; shift 2
  if [ "$what" = profile ]; then
    one "$gpu" "$backend" rotate rotate 110 --profile "$@"
    one "$gpu" "$backend" none none 5 --profile "$@"
    return
  fi
  one "$gpu" "$backend" none none1 200 "$@"
  one "$gpu" "$backend" rotate rotate 10 "$@"
  # Without the skip the other arms still tell something.
  has_cells "$backend-rotate" || SPECPILOT_SKIP=verify one "$gpu" "$backend" rotate rotate-verify 10 "$@"
  one "$gpu" "$backend" none none2 5 "$@"
}
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm --format=csv
gpu=0
for backend in $backends; do backend_runs "$gpu" "$backend" "$@" & gpu=$(( gpu + 1 )); done
wait
merge
for log in "$raw"/*.log; do echo "== $log"; grep -aE 'Error|specpilot:' "$log" | cut -c1-300 | tail -n 6; done
tar cJf "$out/logs.tar.xz" -C "$raw" .
[ -f "$bundle/caches.tar.xz" ] || (cd "$HOME" && tar cf - .cache/flashinfer .triton/cache .cache/tvm-ffi 2>/dev/null | xz -6 -T0 > "$out/caches.tar.xz")
