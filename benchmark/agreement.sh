#!/usr/bin/env bash
# As goals.sh, on an easy and a middling task, where the goals agree in 0 to 100 % of the levels
# (docs/results/own_goals.md).
#
#   bash benchmark/agreement.sh | python benchmark/run.py  125 runs, an hour and a half on two cores
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
goals=benchmark.goals:DoorKeyGoals
for seed in 1 2 3 4 5; do
    for percent in 0 25 50 75 100; do
        version=$percent-v0
        if [ $percent = 0 ]; then version=v0; fi
        flags="--num-agents 4 --env-ids $goals-5x5-green-$version $goals-6x6-green-$version"
        flags="$flags $goals-5x5-blue-$version $goals-6x6-blue-$version --seed $seed"
        flags="$flags --total-timesteps 122880 --learning-rate 1e-3 --kl-coef 0.5 --kl-direction reverse"
        flags="$flags --local-updates 4 --eval-episodes 0 --run-dir runs/agreement-results"
        echo "$prpo --communicator identity $flags --exp-name isolated-$percent"
        for communicator in uniform surrogate; do
            echo "$fedavg --communicator $communicator $flags --exp-name fedavg-$communicator-$percent"
            echo "$prpo --communicator $communicator $flags --exp-name pr-$communicator-$percent"
        done
    done
done
