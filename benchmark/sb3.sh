#!/usr/bin/env bash
# One isolated agent without penalty and value clipping, against stable-baselines3 (docs/prpo_minigrid.md).
#
#   bash benchmark/sb3.sh | python benchmark/run.py  16 runs of 200,000 steps, ten minutes on two cores
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

sb3="OMP_NUM_THREADS=1 python benchmark/baselines/sb3_ppo.py"
prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
alone="--communicator identity --num-agents 1 --kl-coef 0 --kl-direction forward --local-updates 32"
for seed in 1 2 3 4 5 6 7 8; do
    flags="--env-id MiniGrid-DoorKey-6x6-v0 --seed $seed --total-timesteps 200000 --learning-rate 1e-3"
    flags="$flags --no-clip-vloss --eval-episodes 20 --run-dir runs/sb3"
    echo "$sb3 $flags --exp-name sb3"
    echo "$prpo $alone $flags --exp-name isolated"
done
