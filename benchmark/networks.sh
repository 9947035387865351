#!/usr/bin/env bash
# Agents whose networks differ in size (docs/results/networks.md): three agents on DoorKey-6x6.
#
#   bash benchmark/networks.sh | python benchmark/run.py       35 runs, half an hour on two cores
#   bash benchmark/networks.sh tune | python benchmark/run.py  28 runs, half an hour
#
# tune: four coefficients on a tuning seed, for
# `python benchmark/table.py --search --measure auc --runs runs/networks-tune`.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" coefs=0.5 folder=runs/networks-results ;;
    tune) seeds=101 coefs="0.1 0.2 0.5 2" folder=runs/networks-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
equal="--hidden-sizes 64 64 64"
unequal="--hidden-sizes 128 32 32"
for seed in $seeds; do
    for coef in $coefs; do
        flags="--env-id MiniGrid-DoorKey-6x6-v0 --seed $seed --total-timesteps 250000 --learning-rate 1e-3"
        flags="$flags --kl-coef $coef --kl-direction reverse --local-updates 4 --eval-episodes 50 --run-dir $folder"
        end=""
        if [ "$mode" = tune ]; then end=_coef$coef; fi
        echo "$prpo --communicator identity $equal $flags --exp-name isolated-equal$end"
        echo "$fedavg --communicator uniform $equal $flags --exp-name fedavg-uniform-equal$end"
        echo "$prpo --communicator uniform $equal $flags --exp-name pr-uniform-equal$end"
        echo "$prpo --communicator reward $equal $flags --exp-name pr-reward-equal$end"
        # Parameters of unequal networks have no average
        echo "$prpo --communicator identity $unequal $flags --exp-name isolated-unequal$end"
        echo "$prpo --communicator uniform $unequal $flags --exp-name pr-uniform-unequal$end"
        echo "$prpo --communicator reward $unequal $flags --exp-name pr-reward-unequal$end"
    done
done
