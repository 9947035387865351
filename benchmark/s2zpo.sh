#!/usr/bin/env bash
# Bits instead of parameters (docs/results/bits.md): Par-S2ZPO, FedAvg-S2ZPO and their centralised
# counterpart on four tasks of MuJoCo, with the same grid of mu and eta.
#
#   bash benchmark/s2zpo.sh | python benchmark/run.py        1,620 runs with 2, 4 and 8 agents, days
#   bash benchmark/s2zpo.sh short | python benchmark/run.py  240 runs, an hour and three quarters on two cores
#
# short has episodes of 250 steps, 150 iterations and a grid near the defaults of the three methods for
# some 1,600 parameters and four agents. cartpole.sh has the same methods on CartPole.
set -eu
tasks="HalfCheetah-v5 Hopper-v5 Walker2d-v5 Swimmer-v5"
s2zpo="OMP_NUM_THREADS=1 python s2zpo_mujoco.py"
mode=$*
case $mode in
    "") crowds="4 2 8" mus="0.02 0.05 0.1" etas="0.02 0.05 0.1" ;;
    short) crowds=4 mus="0.05 0.1" etas="0.05 0.1" ;;
    *) echo "usage: bash $0 [short]" >&2; exit 2 ;;
esac

for seed in 1 2 3 4 5; do
    for agents in $crowds; do
        for task in $tasks; do
            flags="--horizon 1000 --total-iterations 1000 --num-agents $agents --run-dir runs/s2zpo/$agents/$task"
            if [ "$mode" = short ]; then
                name=$(echo "${task%-v5}" | tr "[:upper:]" "[:lower:]")
                flags="--num-pairs 4 --total-iterations 150 --run-dir runs/s2zpo-results/$name"
            fi
            for mu in $mus; do
                for eta in $etas; do
                    for algorithm in par fedavg central; do
                        cell="--algorithm $algorithm --mu $mu --eta $eta --exp-name ${algorithm}_mu${mu}_eta$eta"
                        echo "$s2zpo --env-id $task --seed $seed $flags $cell"
                    done
                done
            done
        done
    done
done
