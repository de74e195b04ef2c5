#!/usr/bin/env bash
# The first operator's sweep on one GPU of the rig (see setup_rig.sh and operator_sweep.py), in some nine minutes:
#   benchmarks/live/operator_sweep.sh BUNDLE OUT SECONDS [EXTRA...]
# Six engines beside each other, some 110 GB. EXTRA goes to the runs with the plugin (--no-refusals). A call that
# ran out of time is gone on with when its raw.tar.xz is put into BUNDLE.
set -uo pipefail
bundle="$1"; out="$2"; budget="$3"; shift 3
runs="6: "
for attention in triton flashinfer; do
  [ "$attention" = triton ] && server=tree-triton || server=chain-flashinfer
  runs+="operator_sweep --server none-$attention;operator_sweep --server $server $*;"
  runs+="operator_sweep --server $server --no-overlap --clients 1 4 16 64 250 $*;"
done
exec bash "$(dirname "$0")/beside.sh" "$bundle" "$out" "$budget" "${runs%;}"
