# Attention on one GPU, in at most 6 minutes: bash benchmarks/gpu/run_attention.sh DIR OUT   (from the project's root)
# DIR holds flash4.part.* and shapes/. Nothing else is needed: no FLA, no Transformers.
set -u; from=$1 out=$2 T0=$(date +%s); root=$PWD
. benchmarks/gpu/unpack_site.sh $from
export PYTHONPATH=$root:$root/tests:$PYTHONPATH FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
echo unpacked $(( $(date +%s)-T0 )); cd benchmarks/gpu; work=$(mktemp -d)
parts=
check() { timeout 110 python3 attention.py parity $1 $work/$2.json $3 >$work/$2.log 2>&1; }
for dim in 128 192/128 256; do parts="$parts $work/${dim%/*}.json"; check $dim ${dim%/*} & done
for pair in 256:sparse-tiles 256:narrow 128:coarse; do
  parts="$parts $work/v_${pair/:/_}.json"; check ${pair%:*} v_${pair/:/_} ${pair#*:} &
done
for pair in 128:unpacked 256:unpacked; do
  (timeout 110 python3 attention.py compile ${pair%:*} ${pair#*:} >$work/c_${pair/:/_}.log 2>&1) &
done
bash flex.sh $work; wait; parts="$parts $(echo $work/flex-{128,192,256}-{bfloat16,float32}.json)"
grep -hv "arn" $work/*.log | cut -c1-420 | tee $out/parity_attention.log | tail -30; echo parity $(( $(date +%s)-T0 ))
timeout 240 python3 attention.py time $root/$from/shapes $out/attention.json $parts 2>&1 | grep -v arn | cut -c1-600; echo timed $(( $(date +%s)-T0 ))
