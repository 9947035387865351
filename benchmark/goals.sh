#!/usr/bin/env bash
# Shared skills, own goals (docs/results/own_goals.md): two pairs of agents that want the green or the
# blue goal behind a locked door, one of each pair in a small room, one in a large one.
#
#   bash benchmark/goals.sh | python benchmark/run.py       85 runs, two hours on two cores
#   bash benchmark/goals.sh tune | python benchmark/run.py  68 runs, an hour and three quarters
#
# tune: four coefficients of each method on a tuning seed, at full length, because the large rooms are
# learned late. The table below has name, best coefficient there (`python benchmark/table.py --search
# --measure auc --runs runs/goals-tune`) and method; the pull of *proximal* towards the average
# parameters has values of its own.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" episodes=20 folder=runs/goals-results ;;
    tune) seeds=101 episodes=0 folder=runs/goals-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

tasks="benchmark.goals:DoorKeyGoals-5x5-green-v0 benchmark.goals:DoorKeyGoals-8x8-green-v0"
tasks="$tasks benchmark.goals:DoorKeyGoals-5x5-blue-v0 benchmark.goals:DoorKeyGoals-8x8-blue-v0"
for seed in $seeds; do
    flags="--num-agents 4 --env-ids $tasks --seed $seed --total-timesteps 249856 --learning-rate 1e-3"
    flags="$flags --kl-direction reverse --local-updates 4 --eval-episodes $episodes --run-dir $folder"
    while read -r name coefs method; do
        if [ "$mode" = tune ]; then
            coefs="0.02 0.1 0.5 2"
            case $name in proximal-*) coefs="0.001 0.01 0.1 1" ;; esac
        fi
        for coef in $coefs; do
            end=""
            if [ "$mode" = tune ]; then end=_coef$coef; fi
            echo "OMP_NUM_THREADS=1 python $method $coef $flags --exp-name $name$end"
        done
    done << TABLE
isolated                 0.5    prpo_minigrid.py --communicator identity --kl-coef
fedavg-uniform           0.5    fedavg_ppo.py --communicator uniform --kl-coef
fedavg-reward            0.1    fedavg_ppo.py --communicator reward --kl-coef
fedavg-surrogate         0.5    fedavg_ppo.py --communicator surrogate --kl-coef
fedavg-surrogate-linear  0.1    fedavg_ppo.py --communicator surrogate --kl-schedule linear --kl-coef
fedavg-pairs             0.02   fedavg_ppo.py --communicator benchmark/pairs.csv --kl-coef
fedper-uniform           0.02   fedavg_ppo.py --communicator uniform --private-heads actor critic --kl-coef
pr-uniform               0.1    prpo_minigrid.py --communicator uniform --kl-coef
pr-uniform-linear        0.5    prpo_minigrid.py --communicator uniform --kl-schedule linear --kl-coef
pr-reward                0.1    prpo_minigrid.py --communicator reward --kl-coef
pr-reward-linear         0.5    prpo_minigrid.py --communicator reward --kl-schedule linear --kl-coef
pr-surrogate             0.5    prpo_minigrid.py --communicator surrogate --kl-coef
pr-surrogate-linear      0.5    prpo_minigrid.py --communicator surrogate --kl-schedule linear --kl-coef
pr-pairs                 0.5    prpo_minigrid.py --communicator benchmark/pairs.csv --kl-coef
pr-pairs-linear          0.5    prpo_minigrid.py --communicator benchmark/pairs.csv --kl-schedule linear --kl-coef
proximal-uniform         0.1    fedavg_ppo.py --communicator uniform --prox-coef
proximal-reward          0.1    fedavg_ppo.py --communicator reward --prox-coef
TABLE
done
