#!/usr/bin/env bash
# What pooled data would give (docs/fedavg_ppo.md): one agent on the tasks of several (benchmark/pooled.py),
# with the steps of one of them and with the steps of all. Steps, seeds and the other settings are those of
# confirm.sh (benchmark/confirm.md has the plan).
#
#   bash benchmark/pooled.sh doorkey | python benchmark/run.py       10 runs, on the tasks of confirm.sh doorkey
#   bash benchmark/pooled.sh goals | python benchmark/run.py         10 runs, on those of confirm.sh goals
#   bash benchmark/pooled.sh tune doorkey | python benchmark/run.py  8 runs: four coefficients on the tuning seed
#   bash benchmark/pooled.sh tune goals | python benchmark/run.py    8 runs
set -eu
mode=$*
task=${mode#tune }
case $task in
    doorkey) agents=3 pool=benchmark.pooled:DoorKey-5x5-6x6-8x8-v0 ;;
    goals) agents=4 pool=benchmark.pooled:DoorKeyGoals-v0 ;;
    *) echo "usage: bash $0 doorkey | goals | tune doorkey | tune goals" >&2; exit 2 ;;
esac
seeds="6 7 8 9 10"
coefs=0.02
episodes=200
folder=runs/pooled-$task
if [ "$mode" != "$task" ]; then # tuning
    seeds=101
    coefs="0.02 0.1 0.5 2"
    episodes=0
    folder=runs/pooled-tune-$task
fi

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py --communicator identity --num-agents 1 --env-id $pool"
for seed in $seeds; do
    for coef in $coefs; do
        flags="--kl-coef $coef --seed $seed --learning-rate 1e-3 --eval-episodes $episodes --run-dir $folder"
        end=""
        if [ "$mode" != "$task" ]; then end=_coef$coef; fi
        echo "$prpo $flags --total-timesteps 249856 --exp-name pooled$end"
        echo "$prpo $flags --total-timesteps $((agents * 249856)) --exp-name pooled-all$end"
    done
done
