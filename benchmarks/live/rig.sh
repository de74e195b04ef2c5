#!/usr/bin/env bash
# Runs follow_load.py on the GPU rig (see setup_rig.sh).
#   benchmarks/live/rig.sh BUNDLE OUT CONFIG...      CONFIG: "attention=triton tp=1 gpus=0 [overlap=0]"
# Each CONFIG is one run; those joined by "&" run at once, on their GPUs. OUT/follow_load.json holds
# all their summaries.
set -uo pipefail
bundle="$1"; out="$2"; shift 2
. "$(dirname "$0")/setup_rig.sh"
nvidia-smi --query-gpu=name,driver_version --format=csv > "$out/gpu.txt"
run() {  # one configuration, its log in OUT
  local attention=triton tp=1 gpus=0 overlap=1
  for pair in $1; do local "${pair?}"; done
  local flags=(); [ "$overlap" = 0 ] && flags+=(--no-overlap)
  local name="$attention-tp$tp-overlap$overlap"
  CUDA_VISIBLE_DEVICES="$gpus" timeout 420 python3 "$here/follow_load.py" --models "$root/models" --out "$out" \
    --attention "$attention" --tp "$tp" "${flags[@]}" > "$root/$name.log" 2>&1
  echo "$name: exit $?"
  grep -aE 'Error|specpilot:|followed' "$root/$name.log" | cut -c1-300 | tail -n 12
}
for config in "$@"; do
  if [ "${config%&}" != "$config" ]; then run "${config%&}" & else run "$config"; wait; fi
done
wait
python3 -c "import glob, json; print(json.dumps([json.load(open(p)) for p in sorted(glob.glob('$out/summary-*.json'))], indent=1))" > "$out/follow_load.json"
tar cJf "$out/logs.tar.xz" -C "$root" $(cd "$root" && ls *.log)
[ -f "$bundle/caches.tar.xz" ] || (cd "$HOME" && tar cf - .cache/flashinfer .triton/cache .cache/tvm-ffi 2>/dev/null | xz -6 -T0 > "$out/caches.tar.xz")
