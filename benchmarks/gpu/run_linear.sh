# Linear attention on one GPU, in at most 8 minutes: bash benchmarks/gpu/run_linear.sh DIR OUT   (from the project's root)
# DIR holds site.tar.xz, fla_h200/, shapes/ and, if there are any, triton.part.* (what an earlier run left).
set -u; from=$1 out=$2 T0=$(date +%s); root=$PWD
. benchmarks/gpu/unpack_site.sh $from
export PYTHONPATH=$root:$root/tests:$PYTHONPATH FLA_CONFIG_DIR=$root/$from/fla_h200 FLA_CACHE_MODE=fuzzy
python3 benchmarks/gpu/triton_cache.py unpack $from
echo unpacked $(( $(date +%s)-T0 )); cd benchmarks/gpu; work=$(mktemp -d)
for kind in gdn-16/32 kda-32 kda-16; do (timeout 150 python3 warm.py $kind >$work/warm_${kind%/*}.log 2>&1) & done
for part in gdn kda one-token states layers kda-16 exact; do (timeout 200 python3 parity_linear.py $work/$part.json $part >$work/$part.log 2>&1) & done; wait
grep -hv "arn" $work/*.log | cut -c1-420 | tee $out/parity_linear.log | tail -45; echo parity $(( $(date +%s)-T0 ))
python3 parity_linear.py $out/parity.json $work/{gdn,kda,one-token,states,layers,kda-16,exact}.json
find ~/.triton -name "*.autotune.json" -delete  # tuned while eleven processes shared the GPU
first="tot_game24 vmcts_dafny_bst miniswe_b_drop nemo_qwen3think_b_drop prompt-16K-0 nested-16K-15/16"
timeout 110 python3 time_linear.py $out/parity.json $root/$from/shapes $out/linear.json --kinds gdn-16/32 kda-32 --layouts $first >$work/time.log 2>&1
grep -a " ratio \|launches" $work/time.log | cut -c1-190; echo memory $(( $(date +%s)-T0 ))
timeout $(( 440 - $(date +%s) + T0 )) python3 time_linear.py $out/parity.json $root/$from/shapes $out/linear16.json --kinds kda-16 >$work/time16.log 2>&1
grep -a " ratio \|launches" $work/time16.log | cut -c1-190; echo timed $(( $(date +%s)-T0 ))
python3 triton_cache.py pack $out
