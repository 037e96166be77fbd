# Attention on one GPU, in at most 5 minutes: bash benchmarks/gpu/run_attention.sh DIR OUT   (from the project's root)
# DIR holds flash4.part.* (and site.tar.xz, unless an earlier call on this host has unpacked it) and shapes/.
set -u; from=$1 out=$2 T0=$(date +%s); root=$PWD
. benchmarks/gpu/unpack_site.sh $from
export PYTHONPATH=$root:$root/tests:$PYTHONPATH FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
echo unpacked $(( $(date +%s)-T0 )); cd benchmarks/gpu; work=$(mktemp -d)
for dim in 128 192/128 256 flex; do (timeout 110 python3 attention.py parity $dim $work/${dim%/*}.json >$work/${dim%/*}.log 2>&1) & done
for dim in 128 192/128 256; do for mask in packed pointer own; do (timeout 110 python3 attention.py compile $dim $mask >$work/c_${dim%/*}_$mask.log 2>&1) & done; done; wait
grep -hv "arn" $work/*.log | cut -c1-420 | tee $out/parity_attention.log | tail -30; echo parity $(( $(date +%s)-T0 ))
timeout 95 python3 attention.py masks $root/$from/shapes $out/masks.json package packed pointer own 2>&1 | grep -v arn | cut -c1-300; echo masks $(( $(date +%s)-T0 ))
timeout 75 python3 attention.py time $root/$from/shapes $out/attention.json $work/{128,192,256,flex}.json 2>&1 | grep -v arn | cut -c1-330; echo timed $(( $(date +%s)-T0 ))
