#!/usr/bin/env bash
# Easy tasks that teach little (docs/results/easy_tasks.md): three agents, on an easy, a middling and a
# hard KeyCorridor.
#
#   bash benchmark/keycorridor.sh | python benchmark/run.py       35 runs, half an hour on two cores
#   bash benchmark/keycorridor.sh tune | python benchmark/run.py  28 runs, half an hour
#
# tune: four coefficients on a tuning seed, for `python benchmark/table.py --search --measure auc --runs
# runs/keycorridor-tune`.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" coefs=0.5 folder=runs/keycorridor-results ;;
    tune) seeds=101 coefs="0.1 0.2 0.5 2" folder=runs/keycorridor-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
for seed in $seeds; do
    for coef in $coefs; do
        flags="--env-ids MiniGrid-KeyCorridorS3R1-v0 MiniGrid-KeyCorridorS3R2-v0 MiniGrid-KeyCorridorS3R3-v0"
        flags="$flags --seed $seed --total-timesteps 250000 --learning-rate 1e-3 --kl-coef $coef"
        flags="$flags --kl-direction reverse --local-updates 4 --eval-episodes 50 --run-dir $folder"
        end=""
        if [ "$mode" = tune ]; then end=_coef$coef; fi
        echo "$prpo --communicator identity $flags --exp-name isolated$end"
        for communicator in uniform reward; do
            echo "$fedavg --communicator $communicator $flags --exp-name fedavg-$communicator$end"
        done
        for communicator in uniform reward similarity surrogate; do
            echo "$prpo --communicator $communicator $flags --exp-name pr-$communicator$end"
        done
    done
done
