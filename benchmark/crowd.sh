#!/usr/bin/env bash
# More agents (docs/results/more_agents.md): two, four or eight on DoorKey-6x6, with so few steps that an
# isolated one rarely learns it.
#
#   bash benchmark/crowd.sh | python benchmark/run.py       50 runs, 40 minutes on two cores
#   bash benchmark/crowd.sh tune | python benchmark/run.py  16 runs of eight agents, a quarter of an hour
#
# tune: four coefficients on a tuning seed, for
# `python benchmark/table.py --search --measure auc --runs runs/crowd-tune`.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" coefs=0.5 crowds="8 4 2" folder=runs/crowd-results ;;
    tune) seeds=101 coefs="0.1 0.2 0.5 2" crowds=8 folder=runs/crowd-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
for seed in $seeds; do
    for agents in $crowds; do
        for coef in $coefs; do
            flags="--env-id MiniGrid-DoorKey-6x6-v0 --num-agents $agents --seed $seed --total-timesteps 150000"
            flags="$flags --learning-rate 1e-3 --kl-coef $coef --kl-direction reverse --local-updates 4"
            flags="$flags --eval-episodes 50 --run-dir $folder"
            end=-$agents
            if [ "$mode" = tune ]; then end=-${agents}_coef$coef; fi
            if [ "$agents" = 8 ]; then # eight isolated agents are also four or two
                echo "$prpo --communicator identity $flags --exp-name isolated$end"
            fi
            echo "$fedavg --communicator uniform $flags --exp-name fedavg-uniform$end"
            echo "$prpo --communicator uniform $flags --exp-name pr-uniform$end"
            echo "$prpo --communicator reward $flags --exp-name pr-reward$end"
        done
    done
done
