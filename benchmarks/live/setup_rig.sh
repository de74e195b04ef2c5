# Sourced by the scripts beside it, on a GPU machine whose image has torch but not SGLang: unpacks
# BUNDLE ($bundle: site.tar.xz with SGLang 0.5.23 and what it imports, specpilot's wheel, and
# caches.tar.xz and pair.tar.xz if earlier runs left them) and puts it on PYTHONPATH; models go to
# $root/models, a trained pair to $root/pair.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root=/tmp/specpilot-rig
if [ ! -d "$root/site/sglang" ]; then
  mkdir -p "$root/site" "$root/specpilot"
  tar xf "$bundle/site.tar.xz" -C "$root/site"
  [ -f "$bundle/caches.tar.xz" ] && tar xf "$bundle/caches.tar.xz" -C "$HOME"
  for library in "$HOME"/.cache/sglang/.cache/flashinfer/*/*/cached_ops/*/*.so; do  # as built ahead: ninja would build again
    [ -f "$library" ] || continue
    name="$(basename "$library" .so)"; mkdir -p "$root/site/flashinfer/data/aot/$name" && cp "$library" "$root/site/flashinfer/data/aot/$name/"
  done
  [ -f "$bundle/pair.tar.xz" ] && mkdir -p "$root/pair" && tar xf "$bundle/pair.tar.xz" -C "$root/pair"
  python3 "$here/models.py" "$root/models"
  python3 -m compileall -q -j 0 "$root/site" > /dev/null 2>&1  # else every process of every engine does it
fi
wheel="$(cat "$bundle"/specpilot-*.whl | sha256sum)"
if [ "$wheel" != "$(cat "$root/specpilot/wheel" 2>/dev/null)" ]; then  # not under the feet of a run beside this one
  rm -rf "$root/specpilot" && mkdir "$root/specpilot" && python3 -m zipfile -e "$bundle"/specpilot-*.whl "$root/specpilot"
  echo "$wheel" > "$root/specpilot/wheel"
fi
export PYTHONPATH="$root/specpilot:$root/site" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
save_caches() {  # folder: keeps the kernels that were compiled here, for BUNDLE, without what is not read of them
  (cd "$HOME" && find .cache .triton -type f -path '*triton*' \
      \( -name '*.ttir' -o -name '*.ttgir' -o -name '*.llir' -o -name '*.ptx' -o -name '*.source' \) -exec truncate -s 0 {} + 2>/dev/null
    find .cache/sglang/.cache .cache/sglang/jit -type f ! -name '*.so' ! -name 'sgl_deps.json' -delete 2>/dev/null
    tar cf - --ignore-failed-read .cache/sglang .cache/flashinfer .triton/cache .cache/tvm-ffi 2>/dev/null | xz -6 -T0 > "$1/caches.tar.xz")
}
