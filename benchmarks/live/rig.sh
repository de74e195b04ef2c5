#!/usr/bin/env bash
# Runs follow_load.py on a GPU machine whose image has torch but not SGLang.
#   benchmarks/live/rig.sh BUNDLE OUT CONFIG...      CONFIG: "attention=triton tp=1 gpus=0 [overlap=0]"
# BUNDLE holds site.tar.xz (SGLang 0.5.17 and what it imports), specpilot.whl, and caches.tar.xz if
# an earlier run left one in OUT. Each CONFIG is one run; those joined by "&" run at once, on their
# GPUs. OUT/follow_load.json holds all their summaries.
set -uo pipefail
bundle="$1"; out="$2"; shift 2
here="$(cd "$(dirname "$0")" && pwd)"
root=/tmp/specpilot-rig
if [ ! -d "$root/site/sglang" ]; then
  mkdir -p "$root/site" "$root/specpilot"
  tar xf "$bundle/site.tar.xz" -C "$root/site"
  [ -f "$bundle/caches.tar.xz" ] && tar xf "$bundle/caches.tar.xz" -C "$HOME"
  python3 "$here/models.py" "$root/models"
fi
rm -rf "$root/specpilot" && mkdir "$root/specpilot" && python3 -m zipfile -e "$bundle"/specpilot-*.whl "$root/specpilot"
export PYTHONPATH="$root/specpilot:$root/site" PYTHONUNBUFFERED=1
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
ls -la "$out"
