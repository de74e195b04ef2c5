#!/usr/bin/env bash
# Runs attention_identity.py on the GPU rig (see setup_rig.sh), several engines at once on one GPU.
#   benchmarks/live/attention_identity.sh BUNDLE OUT SECONDS SLOTS RUN...
# A RUN is "MODEL ATTENTION ARM [OPTIONS]" as attention_identity.py takes them; SLOTS of them run at a time, in order.
# SECONDS is the budget of the whole call. OUT gets attention_identity.json, logs.tar.xz (raw files too), and
# caches.tar.xz.
set -uo pipefail
bundle="$1"; out="$2"; budget="$3"; slots="$4"; shift 4
SECONDS=0
. "$(dirname "$0")/setup_rig.sh"
raw="$root/attention"; mkdir -p "$raw" "$out"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; echo "unpacked at $SECONDS s"
if [ ! -f "$bundle/caches.tar.xz" ]; then
  python3 "$here/warm_kernels.py" > "$raw/warm.log" 2>&1 &
  warming=$!
fi
one() {  # port, model, attention, arm, options
  local port="$1" model="$2" attention="$3" arm="$4"; shift 4
  local left=$(( budget - SECONDS - 15 ))
  [ "$left" -lt 45 ] && { echo "$model $attention $arm $*: no time left"; return 1; }
  timeout -k 5 "$left" python3 "$here/attention_identity.py" run --models "$root/models" --model "$model" \
    --attention "$attention" --arm "$arm" --raw "$raw" --port "$port" --seconds "$(( left - 20 ))" "$@" 2>&1 | cut -c1-900
  echo "== $model $attention $arm $*: exit ${PIPESTATUS[0]} at $SECONDS s"
}
number=0
for run in "$@"; do
  while [ "$(jobs -rp | grep -vcx "${warming:-none}")" -ge "$slots" ]; do sleep 0.5; done
  one $(( 30000 + 300 * number )) $run & number=$(( number + 1 )); sleep 1
done
wait
python3 "$here/attention_identity.py" merge --raw "$raw" --out "$out/attention_identity.json"
grep -a '^kernel' "$raw/warm.log" 2>/dev/null | cut -c1-400
for log in "$raw"/*.log; do
  grep -qaE 'Traceback|Error' "$log" || continue
  echo "-- $log"; grep -an 'Traceback' "$log" | tail -n 1 | cut -d: -f1 | { read -r line && sed -n "$line,$(( line + 60 ))p" "$log" | cut -c1-200 | grep -vE '^ +[\^~]+$' | tail -n 24; }
done
tar cJf "$out/logs.tar.xz" -C "$raw" .
save_caches "$out"
echo "finished at $SECONDS s"; ls -la "$out"
