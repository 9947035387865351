#!/usr/bin/env bash
# Rewards in different units (docs/results/units.md): the agents of doorkey.sh with equal units, and
# with rewards ten times as large for the agent on the easy or on the hard task. All are evaluated in the
# official units, too.
#
#   bash benchmark/reward_scale.sh | python benchmark/run.py  30 runs of 150,000 steps, three quarters of an hour on two cores
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
easy=MiniGrid-DoorKey-5x5-v0
middling=MiniGrid-DoorKey-6x6-v0
hard=MiniGrid-DoorKey-8x8-v0
easy_times_10=benchmark.scales:DoorKey-5x5-times-10-v0
hard_times_10=benchmark.scales:DoorKey-8x8-times-10-v0
for seed in 1 2 3 4 5; do
    flags="--seed $seed --total-timesteps 150000 --learning-rate 1e-3 --kl-coef 0.5"
    flags="$flags --kl-direction reverse --local-updates 4 --eval-episodes 50 --run-dir runs/reward-scale"
    for method in reward gate; do
        communicator="--communicator reward"
        if [ $method = gate ]; then communicator="--communicator uniform --gate value"; fi
        echo "$prpo $communicator --env-ids $easy $middling $hard $flags --exp-name $method-equal"
        echo "$prpo $communicator --env-ids $easy_times_10 $middling $hard --eval-env-ids $easy $flags --exp-name $method-easy-times-10"
        echo "$prpo $communicator --env-ids $easy $middling $hard_times_10 --eval-env-ids $hard $flags --exp-name $method-hard-times-10"
    done
done
