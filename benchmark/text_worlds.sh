#!/usr/bin/env bash
# Language-model agents in text worlds (docs/results/text_worlds.md): fedagent.sh with a small model in
# BabyAI, 12 clients, three at a time, which have equal or three kinds of unequal tasks. First run
# `python benchmark/babyai.py`.
#
#   bash benchmark/text_worlds.sh | python benchmark/run.py       69 runs, seven hours on two cores
#   bash benchmark/text_worlds.sh tune | python benchmark/run.py  9 runs, an hour
#
# tune: three settings of the penalty on a tuning seed. The runs above are older than this search and have
# the paper's coefficient, or 0.1 with mixed policies.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3" folder=runs/fedagent-quick ;;
    tune) seeds=101 folder=runs/fedagent-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

babyai="OMP_NUM_THREADS=1 python prpo_babyai.py"
isolated="--aggregation none --agents-per-round 3"
fedagent="--aggregation weights --agents-per-round 3"
uniform="--aggregation policy --agents-per-round 3"
self="--aggregation policy --agents-per-round 3 --communicator self-preferred --kl-coef 0.1"
for seed in $seeds; do
    flags="--max-turns 12 --num-agents 12 --tasks-per-agent 16 --local-updates 3 --total-steps 18 --batch-size 8"
    flags="$flags --minibatch-size 0 --learning-rate 2e-3 --advantage-over turns --eval-every 6"
    flags="$flags --eval-episodes 60 --eval-temperature 1 --seed $seed --run-dir $folder"
    if [ "$mode" = tune ]; then
        while read -r end penalty; do
            echo "$babyai $isolated $penalty $flags --categories GoToObj --exp-name local_$end"
            echo "$babyai $fedagent $penalty $flags --categories GoToObj --exp-name fedagent_$end"
            echo "$babyai $uniform $penalty $flags --categories GoToObj --exp-name pr-uniform-grpo_$end"
        done << TABLE
coef0.01
coef0.1         --kl-coef 0.1
coef0.1-linear  --kl-coef 0.1 --kl-schedule linear
TABLE
        continue
    fi
    tasks="--categories GoToObj"
    echo "$babyai $isolated $flags $tasks --exp-name local_iid"
    echo "$babyai --aggregation none --centralised $flags $tasks --exp-name centralised_iid"
    echo "$babyai $fedagent $flags $tasks --exp-name fedagent_iid"
    echo "$babyai $uniform --kl-coef 0.1 $flags $tasks --exp-name pr-uniform-grpo_iid"
    echo "$babyai $self $flags $tasks --exp-name pr-self0.6-grpo_iid"
    for kind in "preference 0.5" "preference 2" "coverage 0.2" "coverage 5" "hardness 0.2" "hardness 5"; do
        partition=${kind% *}
        strength=${kind#* }
        tasks="--partition $partition --strength $strength --categories GoToObj"
        if [ "$partition" = preference ]; then tasks="$tasks OpenDoor"; fi # between which clients prefer one
        echo "$babyai $isolated $flags $tasks --exp-name local_$partition$strength"
        echo "$babyai $fedagent $flags $tasks --exp-name fedagent_$partition$strength"
        echo "$babyai $uniform --kl-coef 0.1 $flags $tasks --exp-name pr-uniform-grpo_$partition$strength"
    done
done
