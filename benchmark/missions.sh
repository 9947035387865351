#!/usr/bin/env bash
# Agents that want different things (docs/results/different_objects.md): three agents in the same rooms, two of
# which have to fetch the key, one the ball.
#
#   bash benchmark/missions.sh | python benchmark/run.py       35 runs, 40 minutes on two cores
#   bash benchmark/missions.sh tune | python benchmark/run.py  28 runs, half an hour
#
# tune: four coefficients on a tuning seed, for
# `python benchmark/table.py --search --measure auc --runs runs/missions-tune`.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" coefs=0.5 folder=runs/missions-results ;;
    tune) seeds=101 coefs="0.1 0.2 0.5 2" folder=runs/missions-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
key=benchmark.levels:Fetch-5x5-N2-key-v0
ball=benchmark.levels:Fetch-5x5-N2-ball-v0
for seed in $seeds; do
    for coef in $coefs; do
        flags="--env-ids $key $ball $key --seed $seed --total-timesteps 143360 --learning-rate 1e-3 --kl-coef $coef"
        flags="$flags --kl-direction reverse --local-updates 4 --eval-episodes 50 --run-dir $folder"
        end=""
        if [ "$mode" = tune ]; then end=_coef$coef; fi
        echo "$prpo --communicator identity $flags --exp-name isolated$end"
        echo "$fedavg --communicator uniform $flags --exp-name fedavg-uniform$end"
        echo "$prpo --communicator uniform $flags --exp-name pr-uniform$end"
        echo "$prpo --communicator self-preferred --self-preference 0.6 $flags --exp-name pr-self0.6$end"
        echo "$prpo --communicator self-preferred --self-preference 0.2 $flags --exp-name pr-self0.2$end"
        echo "$prpo --communicator similarity $flags --exp-name pr-similarity$end"
        echo "$prpo --communicator surrogate $flags --exp-name pr-surrogate$end"
    done
done
