# Parity of FlexAttention at all head dims in bf16 and float32, side by side: bash flex.sh OUT   (in this folder)
for dim in 128 192/128 256; do for dtype in bfloat16 float32; do
  (timeout 110 python3 attention.py parity flex-$dim $1/flex-${dim%/*}-$dtype.json $dtype >$1/flex-${dim%/*}-$dtype.log 2>&1) &
done; done; wait
