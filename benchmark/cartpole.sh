#!/usr/bin/env bash
# Bits instead of parameters (docs/results/bits.md) on CartPole: as s2zpo.sh, with a larger grid.
#
#   bash benchmark/cartpole.sh | python benchmark/run.py        180 runs, a quarter of an hour on two cores
#   bash benchmark/cartpole.sh quick | python benchmark/run.py  36 runs of one seed, five minutes on one core
set -eu
case $* in
    "") seeds="1 2 3 4 5" folder=runs/s2zpo-results/cartpole ;;
    quick) seeds=1 folder=runs/s2zpo-quick/cartpole ;;
    *) echo "usage: bash $0 [quick]" >&2; exit 2 ;;
esac

s2zpo="OMP_NUM_THREADS=1 python s2zpo_mujoco.py"
flags="--env-id CartPole-v1 --hidden-sizes 32 --num-pairs 4 --total-iterations 60 --run-dir $folder"
for seed in $seeds; do
    for mu in 0.1 0.2 0.4; do
        for eta in 0.05 0.1 0.2 0.4; do
            for algorithm in par fedavg central; do
                cell="--algorithm $algorithm --mu $mu --eta $eta --exp-name ${algorithm}_mu${mu}_eta$eta"
                echo "$s2zpo $flags --seed $seed $cell"
            done
        done
    done
done
