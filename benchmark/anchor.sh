#!/usr/bin/env bash
# What slows mixing down, peers or the age of their snapshots (docs/results/rounds.md): agents held by
# their own snapshot of the last round, and rounds after every 1, 4, 16 or 32 iterations, on three DoorKeys.
#
#   bash benchmark/anchor.sh | python benchmark/run.py  50 runs, an hour and a half on two cores
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
for seed in 1 2 3 4 5; do
    flags="--env-ids MiniGrid-DoorKey-5x5-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DoorKey-8x8-v0"
    flags="$flags --total-timesteps 250000 --learning-rate 1e-3 --kl-direction reverse --eval-episodes 50"
    flags="$flags --seed $seed --run-dir runs/anchor-results/doorkey"
    alone="--communicator identity --local-updates 4"
    echo "$prpo $flags $alone --kl-coef 0.5 --exp-name isolated"
    echo "$prpo $flags $alone --self-reference snapshot --kl-coef 0.3333 --exp-name isolated-snapshot"
    uniform="--communicator uniform --kl-coef 0.5"
    echo "$prpo $flags $uniform --local-updates 4 --exp-name pr-uniform"
    echo "$fedavg $flags $uniform --local-updates 4 --exp-name fedavg-uniform"
    for interval in 1 16 32; do
        echo "$prpo $flags $uniform --local-updates $interval --exp-name pr-uniform-every$interval"
        echo "$fedavg $flags $uniform --local-updates $interval --exp-name fedavg-uniform-every$interval"
    done
done
