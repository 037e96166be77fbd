# Whole models on one GPU: bash benchmarks/gpu/run_whole.sh DIR OUT SECONDS [whole.py's options]   (from the project's root)
# DIR holds fla_h200/ and shapes/, and both archives unless earlier calls on this host have unpacked them. HARTS_WORK names a
# folder that a later run goes on from (e.g. --stages check, then --stages time).
set -u; from=$1 out=$2 seconds=$3 T0=$(date +%s); root=$PWD; shift 3
. benchmarks/gpu/unpack_site.sh $from
export PYTHONPATH=$root:$root/tests:$PYTHONPATH FLA_CACHE_MODE=full
export FLA_CONFIG_DIR=$(mktemp -d) FLA_CONFIG_DIR_FEW_STAGES=$(mktemp -d)
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=2
python3 benchmarks/gpu/triton_cache.py unpack $from
python3 benchmarks/gpu/fla_defaults.py $from/fla_h200 $FLA_CONFIG_DIR
python3 benchmarks/gpu/fla_defaults.py $from/fla_h200 $FLA_CONFIG_DIR_FEW_STAGES 1
echo unpacked $(( $(date +%s)-T0 ))
rm -f $out/pytest.log
case " $* " in *" time "*) ;; *)  # nothing else runs while models are timed
  (timeout 60 python3 -m pytest -m gpu -q --disable-warnings tests/ops -p no:cacheprovider 2>&1 | tail -15 >$out/pytest.log) & ;;
esac
cd benchmarks/gpu; work=${HARTS_WORK:-$(mktemp -d)}
timeout $(( seconds + 30 )) python3 whole.py $out/whole.json $root/$from/shapes --budget $seconds --folder $work "$@"; wait
cat $out/pytest.log 2>/dev/null; tail -n 40 $work/*-verdict-*.json >$out/verdicts.txt 2>/dev/null; cat $work/*.log >$out/whole.log
echo whole $(( $(date +%s)-T0 )); python3 triton_cache.py pack $out
