#!/usr/bin/env bash
# What the documentation says of attention backends, on one GPU of the rig (see setup_rig.sh), in some six minutes:
#   benchmarks/live/attention_backends.sh BUNDLE OUT SECONDS [identity|parity|all] [EXTRA...]
# EXTRA goes to the runs with the plugin (--no-refusals). Identity needs 90 GB of the GPU, parity 110 GB.
set -uo pipefail
bundle="$1"; out="$2"; budget="$3"; what="${4:-all}"; shift "$(( $# < 4 ? $# : 4 ))"
identity="9: " parity="6: "
for run in "small-llama flashinfer none" "small-mla-dense flashinfer none" "small-mla-dense triton none" \
  "small-mla-moe triton none" "small-llama flashinfer chain" "small-mla-dense flashinfer chain" \
  "small-mla-dense triton chain" "small-mla-dense triton tree" "small-mla-moe triton tree" \
  "small-mla-dense flashinfer tree" "small-llama flashinfer tree" "small-mla-nextn triton chain" \
  "small-mla-nextn flashinfer chain" "small-llama triton none" "small-llama triton chain" "small-llama triton tree"; do
  read -r model attention arm <<< "$run"
  [ "$arm" = none ] && extra="" || extra="$*"
  identity+="attention_identity --model $model --attention $attention --arm $arm $extra;"
done
for run in "half-8b flashinfer" "mla-dense flashinfer" "mla-dense triton"; do
  read -r model attention <<< "$run"
  cells="--model $model --attention $attention --arms skip --rounds 3 --batches 1 16 64 --no-end-to-end --resume"
  parity+="skip_parity --arm none $cells;skip_parity --arm rotate $cells $*;"
done
groups=("${identity%;}" "${parity%;}")
[ "$what" = identity ] && groups=("${identity%;}")
[ "$what" = parity ] && groups=("${parity%;}")
exec bash "$(dirname "$0")/beside.sh" "$bundle" "$out" "$budget" "${groups[@]}"
