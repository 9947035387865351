#!/usr/bin/env bash
# Shared skills, own goals, on a second task (docs/results/own_goals.md): as goals.sh, but two agents have
# to pick up the ball behind the door and two the box.
#
#   bash benchmark/unlock_goals.sh | python benchmark/run.py       85 runs, two hours on two cores
#   bash benchmark/unlock_goals.sh tune | python benchmark/run.py  68 runs, an hour and three quarters
#
# tune: four coefficients of each method on a tuning seed, at full length. The table below has name, best
# coefficient there (`python benchmark/table.py --search --measure auc --runs runs/unlock-goals-tune`) and method; the
# pull of *proximal* towards the average parameters has values of its own.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" episodes=20 folder=runs/unlock-goals-results ;;
    tune) seeds=101 episodes=0 folder=runs/unlock-goals-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

tasks="benchmark.goals:UnlockGoals-5x5-ball-v0 benchmark.goals:UnlockGoals-6x6-ball-v0"
tasks="$tasks benchmark.goals:UnlockGoals-5x5-box-v0 benchmark.goals:UnlockGoals-6x6-box-v0"
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
isolated                 2      prpo_minigrid.py --communicator identity --kl-coef
fedavg-uniform           0.1    fedavg_ppo.py --communicator uniform --kl-coef
fedavg-reward            0.5    fedavg_ppo.py --communicator reward --kl-coef
fedavg-surrogate         0.1    fedavg_ppo.py --communicator surrogate --kl-coef
fedavg-surrogate-linear  0.1    fedavg_ppo.py --communicator surrogate --kl-schedule linear --kl-coef
fedavg-pairs             0.02   fedavg_ppo.py --communicator benchmark/pairs.csv --kl-coef
fedper-uniform           0.5    fedavg_ppo.py --communicator uniform --private-heads actor critic --kl-coef
pr-uniform               0.1    prpo_minigrid.py --communicator uniform --kl-coef
pr-uniform-linear        0.1    prpo_minigrid.py --communicator uniform --kl-schedule linear --kl-coef
pr-reward                0.1    prpo_minigrid.py --communicator reward --kl-coef
pr-reward-linear         0.1    prpo_minigrid.py --communicator reward --kl-schedule linear --kl-coef
pr-surrogate             0.1    prpo_minigrid.py --communicator surrogate --kl-coef
pr-surrogate-linear      0.5    prpo_minigrid.py --communicator surrogate --kl-schedule linear --kl-coef
pr-pairs                 0.02   prpo_minigrid.py --communicator benchmark/pairs.csv --kl-coef
pr-pairs-linear          0.1    prpo_minigrid.py --communicator benchmark/pairs.csv --kl-schedule linear --kl-coef
proximal-uniform         0.001  fedavg_ppo.py --communicator uniform --prox-coef
proximal-reward          0.01   fedavg_ppo.py --communicator reward --prox-coef
TABLE
done
