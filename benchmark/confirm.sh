#!/usr/bin/env bash
# Confirmation on fresh seeds (benchmark/confirm.md has the rules): one task at a time.
#
#   bash benchmark/confirm.sh goals | python benchmark/run.py         140 runs
#   bash benchmark/confirm.sh skills | python benchmark/run.py        140 runs
#   bash benchmark/confirm.sh doorkey | python benchmark/run.py       130 runs
#   bash benchmark/confirm.sh unlock | python benchmark/run.py        140 runs
#   bash benchmark/confirm.sh tune goals | python benchmark/run.py    40 runs
#   bash benchmark/confirm.sh tune skills | python benchmark/run.py   40 runs
#   bash benchmark/confirm.sh tune doorkey | python benchmark/run.py  36 runs
#   bash benchmark/confirm.sh tune unlock | python benchmark/run.py   40 runs
#
# goals, unlock: four agents with goals of their own; doorkey: three rooms of different size; skills: one
# agent practises key and door, one begins behind the door, four need the whole chain, two of them with
# smaller networks. Averages need equal networks, so methods of fedavg_ppo.py have six large ones.
#
# The table below has a name, the last reporting seed (the first is 6), the settings that are tried on the
# tuning seed 101, the chosen setting on each task (-: not run there), and the method, in which a setting
# takes the places of X and Y. Seeds are outermost: a list that is cut off has whole seeds.
set -eu
mode=$*
task=${mode#tune }
case $task in
    goals | skills | doorkey | unlock) ;;
    *)
        modes="goals | skills | doorkey | unlock | tune goals | tune skills | tune doorkey | tune unlock"
        echo "usage: bash $0 $modes" >&2
        exit 2
        ;;
esac

own=benchmark.goals:DoorKeyGoals
agents=4
sizes=""
case $task in
    goals) tasks="$own-5x5-green-v0 $own-8x8-green-v0 $own-5x5-blue-v0 $own-8x8-blue-v0" ;;
    unlock)
        own=benchmark.goals:UnlockGoals
        tasks="$own-5x5-ball-v0 $own-6x6-ball-v0 $own-5x5-box-v0 $own-6x6-box-v0"
        ;;
    doorkey)
        agents=3
        tasks="MiniGrid-DoorKey-5x5-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DoorKey-8x8-v0"
        ;;
    skills)
        agents=6
        sizes=" --hidden-sizes 128 128 128 128 64 64"
        tasks="benchmark.goals:KeyDoor-8x8-v0 benchmark.goals:BehindDoor-8x8-v0"
        tasks="$tasks $own-8x8-green-v0 $own-8x8-blue-v0 $own-8x8-green-v0 $own-8x8-blue-v0"
        ;;
esac

seeds=$(seq 6 25)
episodes=200
folder=runs/confirm-$task
if [ "$mode" != "$task" ]; then # tuning
    seeds=101
    episodes=0
    folder=runs/confirm-tune-$task
fi
for seed in $seeds; do
    flags="--num-agents $agents --env-ids $tasks --seed $seed --total-timesteps 249856"
    flags="$flags --learning-rate 1e-3 --eval-episodes $episodes --run-dir $folder"
    while read -r name last tried goals skills doorkey unlock method; do
        chosen=${!task} # the column with the task's name
        if [ "$chosen" = - ]; then continue; fi
        if [ "$mode" != "$task" ]; then
            settings=${tried//,/ }
        elif [ "$seed" -le "$last" ]; then
            settings=$chosen
        else
            continue
        fi
        for setting in $settings; do
            words=${method/ X/ ${setting%/*}}
            words=${words/ Y/ ${setting#*/}}
            case $method in
                fedavg_ppo.py*) ;;
                *) words=$words$sizes ;;
            esac
            end=""
            if [ "$mode" != "$task" ]; then end=_${setting/\//_}; fi
            echo "OMP_NUM_THREADS=1 python $words $flags --exp-name $name$end"
        done
    done << TABLE
isolated         15 0.02,0.1,0.5,2                          0.5         0.5         0.5         2           prpo_minigrid.py --communicator identity --kl-coef X
fedavg-uniform   15 1/1,4/1,16/1,4/0.5                      16/1        16/1        4/1         4/1         fedavg_ppo.py --communicator uniform --kl-coef 0.1 --local-updates X --server-lr Y
fedavg-reward    25 1/1,4/1,16/1,4/0.5                      16/1        16/1        1/1         16/1        fedavg_ppo.py --communicator reward --kl-coef 0.1 --local-updates X --server-lr Y
exploit          15 4,8,16,32                               32          32          16          32          fedavg_ppo.py --communicator best --kl-coef 0.1 --local-updates X
fedper-uniform   15 0.02,0.1,0.5,2                          0.02        0.02        -           2           fedavg_ppo.py --communicator uniform --private-heads actor critic --kl-coef X
kickstarting     25 0.1/reverse,0.5/reverse,0.5/forward,2/forward 0.5/forward 0.5/forward 0.5/forward 0.1/reverse prpo_minigrid.py --communicator best --kl-schedule linear --kl-coef X --kl-direction Y
distral          15 0.1/3e-4,0.1/1e-3,0.5/3e-4,0.5/1e-3     0.1/1e-3    0.1/1e-3    0.5/3e-4    0.1/1e-3    distral_minigrid.py --kl-schedule linear --kl-coef X --central-learning-rate Y
pr-uniform       15 0.02,0.1,0.5,2                          0.1         0.1         0.1         0.1         prpo_minigrid.py --communicator uniform --kl-coef X
pr-reward-linear 25 0.02,0.1,0.5,2                          0.5         0.5         0.5         0.1         prpo_minigrid.py --communicator reward --kl-schedule linear --kl-coef X
pr-gate-linear   25 0.02,0.1,0.5,2                          0.5         0.5         2           0.1         prpo_minigrid.py --communicator uniform --gate value --kl-schedule linear --kl-coef X
TABLE
done
