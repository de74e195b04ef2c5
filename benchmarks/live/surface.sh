#!/usr/bin/env bash
# Runs surface.py on the GPU rig (see setup_rig.sh): one attention backend a GPU, both arms, one after the other.
#   benchmarks/live/surface.sh BUNDLE OUT SECONDS_ADAPTIVE SECONDS_NONE
set -uo pipefail
bundle="$1"; out="$2"
. "$(dirname "$0")/setup_rig.sh"
measure() {  # GPU, attention backend, seconds of the arms
  for arm in adaptive none; do
    local seconds="$3"; [ "$arm" = none ] && seconds="$4"
    CUDA_VISIBLE_DEVICES="$1" python3 "$here/surface.py" --models "$root/models" --attention "$2" --arm "$arm" \
      --seconds "$seconds" --out "$out/surface-$2-$arm.json" 2>&1 | cut -c1-400
  done
}
measure 0 triton "$3" "$4" &
measure 1 fa3 "$3" "$4" &
wait
