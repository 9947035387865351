#!/usr/bin/env bash
# The paper's other two tasks, which are learned sooner than FourRooms (docs/results/one_task.md).
#
#   bash benchmark/doorkey6x6_distshift2.sh | python benchmark/run.py  30 runs of 1 M steps, an hour on two cores
set -eu
if [ -n "$*" ]; then
    echo "usage: bash $0" >&2
    exit 2
fi

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
for seed in 1 2 3 4 5; do
    for task in MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0; do
        flags="--env-id $task --seed $seed --total-timesteps 1000000 --learning-rate 1e-3 --local-updates 4"
        flags="$flags --kl-coef 0.5 --kl-direction reverse --run-dir runs/minigrid-1m"
        echo "$prpo --communicator identity $flags --exp-name isolated"
        echo "$fedavg --communicator uniform $flags --exp-name fedavg-uniform"
        echo "$prpo --communicator uniform $flags --exp-name pr-uniform"
    done
done
