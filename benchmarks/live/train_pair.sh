#!/usr/bin/env bash
# Runs train_pair.py on the GPU rig (see setup_rig.sh), then serves the pair once on each attention backend.
#   benchmarks/live/train_pair.sh BUNDLE OUT [SECONDS]      SECONDS of training, default 170
# OUT gets pair.tar.xz (target, eagle3, standalone, prompts.json, train.json, check-*.json; about 15 MB),
# train.json and the logs. A later run of another script finds the pair where BUNDLE has pair.tar.xz.
set -uo pipefail
bundle="$1"; out="$2"
. "$(dirname "$0")/setup_rig.sh"
pair="$root/pair"; mkdir -p "$out" "$pair"
pack() { tar cJf "$out/pair.tar.xz" -C "$pair" .; cp "$pair"/*.json "$out/" 2>/dev/null; rm -f "$out/prompts.json"; }
timeout 300 python3 "$here/train_pair.py" "$pair" --seconds "${3:-170}" 2>&1 | cut -c1-600
echo "training: exit ${PIPESTATUS[0]}"
pack
for attention in triton fa3; do
  timeout 130 python3 "$here/train_pair.py" "$pair" --check "$attention" > "$root/check-$attention.log" 2>&1
  echo "check on $attention: exit $?"
  [ -f "$pair/check.json" ] && mv "$pair/check.json" "$pair/check-$attention.json" && cut -c1-800 "$pair/check-$attention.json"
  grep -aE 'Error|error' "$root/check-$attention.log" | cut -c1-300 | tail -n 5
  pack
done
tar cJf "$out/logs.tar.xz" -C "$root" $(cd "$root" && ls check-*.log)
