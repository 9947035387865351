#!/usr/bin/env bash
# The paper's other two tasks, which are learned sooner than FourRooms (docs/results/one_task.md).
#
#   bash benchmark/doorkey6x6_distshift2.sh | python benchmark/run.py        30 runs of 1 M steps, an hour on two cores
#   bash benchmark/doorkey6x6_distshift2.sh short | python benchmark/run.py  42 runs of 200,000 steps, twenty minutes
#
# short has more methods and fewer seeds: the results of docs/prpo_minigrid.md.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" steps=1000000 folder=runs/minigrid-1m ;;
    short) seeds="1 2 3" steps=200000 folder=runs/minigrid-results ;;
    *) echo "usage: bash $0 [short]" >&2; exit 2 ;;
esac

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
for seed in $seeds; do
    for task in MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0; do
        flags="--env-id $task --seed $seed --total-timesteps $steps --learning-rate 1e-3 --local-updates 4"
        flags="$flags --run-dir $folder"
        reverse="--kl-coef 0.5 --kl-direction reverse"
        echo "$prpo --communicator identity $flags $reverse --exp-name isolated"
        echo "$fedavg --communicator uniform $flags $reverse --exp-name fedavg-uniform"
        echo "$prpo --communicator uniform $flags $reverse --exp-name pr-uniform"
        if [ "$mode" = short ]; then
            echo "$prpo --communicator similarity $flags $reverse --exp-name pr-similarity"
            echo "$prpo --communicator reward $flags $reverse --exp-name pr-reward"
            forward="--kl-coef 0.5 --kl-direction forward"
            echo "$prpo --communicator uniform $flags $forward --exp-name pr-uniform-forward"
            no_penalty="--kl-coef 0 --kl-direction reverse"
            echo "$prpo --communicator identity $flags $no_penalty --exp-name isolated-no-penalty"
        fi
    done
done
