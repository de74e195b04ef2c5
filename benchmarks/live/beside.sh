#!/usr/bin/env bash
# Runs several of the scripts beside it on one GPU of the rig (see setup_rig.sh), engines beside each other.
#   benchmarks/live/beside.sh BUNDLE OUT SECONDS GROUP...
# A GROUP is "SLOTS: RUN; RUN; ..." and begins when the one before has ended; SLOTS of its runs go at a time, in
# order. A RUN is a script and its options without --models, --raw, --port and --seconds:
#   beside.sh B O 480 "6: attention_identity --model small-llama --attention triton --arm none; ..." \
#     "4: skip_parity --model mla-dense --attention triton --arm none; ..."
# SECONDS is the budget of the whole call. OUT gets SCRIPT.json of each script, raw.tar.xz (logs too), and
# caches.tar.xz where BUNDLE has none. A raw.tar.xz in BUNDLE is gone on with.
set -uo pipefail
bundle="$1"; out="$2"; budget="$3"; shift 3
SECONDS=0
. "$(dirname "$0")/setup_rig.sh"
raw="$root/raw"; mkdir -p "$out"
[ -d "$raw" ] || { mkdir -p "$raw"; [ -f "$bundle/raw.tar.xz" ] && tar xf "$bundle/raw.tar.xz" -C "$raw"; }
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader; echo "unpacked at $SECONDS s"
if [ ! -f "$bundle/caches.tar.xz" ]; then
  python3 "$here/warm_kernels.py" > "$raw/warm.log" 2>&1 & warming=$!
fi
one() {  # port, script, options
  local port="$1" script="$2"; shift 2
  local left=$(( budget - SECONDS - 20 ))
  local turn=(); [ "$script" = attention_identity ] || turn=(--turn "$raw/turn")
  [ "$left" -lt 45 ] && { echo "$script $*: no time left"; return 1; }
  timeout -k 5 "$left" python3 "$here/$script.py" run --models "$root/models" --raw "$raw/$script" --port "$port" \
    --seconds "$(( left - 20 ))" "${turn[@]}" "$@" 2>&1 | cut -c1-700
  echo "== $script $*: exit ${PIPESTATUS[0]} at $SECONDS s"
}
merge() {
  local script
  for script in attention_identity skip_parity operator_sweep; do
    [ -d "$raw/$script" ] && python3 "$here/$script.py" merge --raw "$raw/$script" --out "$out/$script.json"
  done
}
number=0
for group in "$@"; do
  slots="${group%%:*}"; IFS=';' read -ra runs <<< "${group#*:}"
  for run in "${runs[@]}"; do
    while [ "$(jobs -rp | grep -vcx "${warming:-none}")" -ge "$slots" ]; do sleep 0.5; done
    one $(( 30000 + 300 * number )) $run & number=$(( number + 1 )); sleep 1
  done
  for job in $(jobs -rp | grep -vx "${warming:-none}"); do wait "$job"; done
  merge > /dev/null 2>&1  # what there is, should the machine go away
  echo "group ended at $SECONDS s"
done
merge
grep -a '^kernel' "$raw/warm.log" 2>/dev/null | cut -c1-300
for log in "$raw"/*/*.log; do
  line="$(grep -an 'Traceback' "$log" | head -n 1 | cut -d: -f1)"
  [ -n "$line" ] && { echo "-- $log"; sed -n "$line,$(( line + 70 ))p" "$log" | cut -c1-160 | grep -vE '^ +[\^~]+$' | grep -B 14 -m 1 -E '^\S*(Error|Exception|Exit)'; }
done
tar cJf "$out/raw.tar.xz" -C "$raw" .
[ -f "$bundle/caches.tar.xz" ] || save_caches "$out"
echo "finished at $SECONDS s"; ls -la "$out"
