#!/usr/bin/env bash
# The paper's FourRooms at a fifth of its length (docs/results/one_task.md): six methods, five seeds.
#
#   bash benchmark/fourrooms.sh | python benchmark/run.py  30 runs of 1 M steps, an hour and a half on two cores
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
for seed in 1 2 3 4 5; do
    flags="--env-id MiniGrid-FourRooms-v0 --seed $seed --total-timesteps 1000000 --learning-rate 1e-3"
    flags="$flags --kl-coef 0.5 --local-updates 4 --run-dir runs/fourrooms-results"
    echo "$prpo --communicator identity $flags --kl-direction reverse --exp-name isolated"
    echo "$fedavg --communicator uniform $flags --kl-direction reverse --exp-name fedavg-uniform"
    echo "$prpo --communicator uniform $flags --kl-direction reverse --exp-name pr-uniform"
    echo "$prpo --communicator similarity $flags --kl-direction reverse --exp-name pr-similarity"
    echo "$prpo --communicator reward $flags --kl-direction reverse --exp-name pr-reward"
    echo "$prpo --communicator uniform $flags --kl-direction forward --exp-name pr-uniform-forward"
done
