# Attention on one GPU, in at most 6 minutes: bash benchmarks/gpu/run_attention.sh DIR OUT   (from the project's root)
# DIR holds flash4.part.* and shapes/. Nothing else is needed: no FLA, no Transformers.
set -u; from=$1 out=$2 T0=$(date +%s); root=$PWD
. benchmarks/gpu/unpack_site.sh $from
export PYTHONPATH=$root:$root/tests:$PYTHONPATH FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
echo unpacked $(( $(date +%s)-T0 )); cd benchmarks/gpu; work=$(mktemp -d)
for dim in 128 192/128 256; do (timeout 110 python3 attention.py parity $dim $work/${dim%/*}.json >$work/${dim%/*}.log 2>&1) & done
bash flex.sh $work &
for pair in 256:sparse-tiles 256:narrow 128:coarse; do
  (timeout 110 python3 attention.py parity ${pair%:*} $work/v_${pair/:/_}.json ${pair#*:} >$work/v_${pair/:/_}.log 2>&1) &
done
for pair in 128:unpacked 256:unpacked; do
  (timeout 110 python3 attention.py compile ${pair%:*} ${pair#*:} >$work/c_${pair/:/_}.log 2>&1) &
done; wait
grep -hv "arn" $work/*.log | cut -c1-420 | tee $out/parity_attention.log | tail -30; echo parity $(( $(date +%s)-T0 ))
timeout 240 python3 attention.py time $root/$from/shapes $out/attention.json $work/{128,192,256,flex-{128,192,256}-{bfloat16,float32},v_256_sparse-tiles,v_256_narrow,v_128_coarse}.json 2>&1 | grep -v arn | cut -c1-600; echo timed $(( $(date +%s)-T0 ))
