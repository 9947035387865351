#!/usr/bin/env bash
# The paper's figures on MiniGrid with the grids of its table 2: three tasks, five methods, ten seeds.
#
#   bash benchmark/minigrid.sh | python benchmark/run.py        4,950 runs of 5 M steps, 1,700 hours on two cores
#   bash benchmark/minigrid.sh quick | python benchmark/run.py  60 runs of 1 M steps on two tasks, four hours
#   bash benchmark/minigrid.sh tune | python benchmark/run.py   225 runs of 250,000 steps on FourRooms, four hours
#
# tune is a search on one seed, with a round every 4 iterations and the reverse KL, and two methods with
# the forward KL besides; `python benchmark/table.py --search --measure auc --runs runs/minigrid-tune` tells which
# settings are best.
set -eu

tasks="MiniGrid-FourRooms-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0"
seeds="1 2 3 4 5 6 7 8 9 10"
steps=5000000
rates="5e-5 1e-4 2.5e-4 5e-4 1e-3"
coefs="0.5 1 2 5 10 20 50"  # of isolated agents and FedAvg
peer_coefs="0.5 1 2 5 10 20" # of PR-PPO
direction=forward
updates=32
folder=runs/minigrid

mode=$*
case $mode in
    "") ;;
    quick)
        tasks="MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0"
        seeds="1 2 3"
        steps=1000000
        rates="2.5e-4 1e-3"
        coefs=0.5
        peer_coefs=0.5
        folder=runs/minigrid-quick
        ;;
    tune)
        tasks=MiniGrid-FourRooms-v0
        seeds=101
        steps=250000
        direction=reverse
        updates=4
        folder=runs/minigrid-tune
        ;;
    *) echo "usage: bash $0 [quick | tune]" >&2; exit 2 ;;
esac

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
for seed in $seeds; do
    for task in $tasks; do
        flags="--env-id $task --seed $seed --total-timesteps $steps --local-updates $updates --run-dir $folder"
        for rate in $rates; do
            for coef in $coefs; do
                setting="--learning-rate $rate --kl-coef $coef --kl-direction $direction"
                end="_lr${rate}_coef$coef"
                echo "$prpo --communicator identity $flags $setting --exp-name isolated$end"
                echo "$fedavg --communicator uniform $flags $setting --exp-name fedavg-uniform$end"
                echo "$fedavg --communicator similarity $flags $setting --exp-name fedavg-similarity$end"
            done
            for coef in $peer_coefs; do
                setting="--learning-rate $rate --kl-coef $coef --kl-direction $direction"
                end="_lr${rate}_coef$coef"
                echo "$prpo --communicator uniform $flags $setting --exp-name pr-uniform$end"
                echo "$prpo --communicator similarity $flags $setting --exp-name pr-similarity$end"
                if [ "$mode" = tune ]; then
                    setting="--learning-rate $rate --kl-coef $coef --kl-direction forward"
                    echo "$prpo --communicator uniform $flags $setting --exp-name pr-uniform-forward$end"
                    echo "$prpo --communicator similarity $flags $setting --exp-name pr-similarity-forward$end"
                fi
            done
        done
    done
done
