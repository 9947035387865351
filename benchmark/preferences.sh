#!/usr/bin/env bash
# Language models with preferences of their own (docs/results/language_models.md): tiny agents that share
# skills, and whose rewards weigh styles differently. First run `python benchmark/skills.py --preferences
# --prompt-shares 0.8 --prompts 1800 --out runs/preferences`.
#
#   bash benchmark/preferences.sh | python benchmark/run.py       70 runs, ten minutes on two cores
#   bash benchmark/preferences.sh tune | python benchmark/run.py  42 runs of a quarter of a minute each
#
# tune: three pairs of learning rate and coefficient on a tuning seed. The table below has the pairs that
# are best there, as `python benchmark/table.py --search --measure auc --runs runs/preferences-tune` tells.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" folder=runs/preferences-results ;;
    tune) seeds=101 folder=runs/preferences-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

styles="--base-model runs/preferences/model --dataset runs/preferences/train.jsonl"
styles="$styles --reward benchmark/skills.py:content benchmark/skills.py:mark benchmark/skills.py:capitals"
styles="$styles benchmark/skills.py:quotes --reward-weights runs/preferences/weights.csv --missing-eos-penalty 0"
styles="$styles --precision float32 --temperature 1 --response-length 15 --lora-rank 8 --prompts-per-agent 400"
styles="$styles --eval-prompts 100 --total-steps 24 --local-updates 1 --run-dir $folder"
grpo="--batch-size 8 --micro-batch-size 8"
ppo="--algorithm ppo --batch-size 32 --micro-batch-size 32"
for seed in $seeds; do
    while read -r name grpo_pairs ppo_pairs method; do
        if [ "$mode" = tune ]; then
            grpo_pairs="1e-3,0.1 3e-3,0.1 3e-3,0.5"
            ppo_pairs=$grpo_pairs
        fi
        run="OMP_NUM_THREADS=1 python prpo_llm.py $method $styles --seed $seed"
        for pair in $grpo_pairs; do
            rate=${pair%,*}
            coef=${pair#*,}
            end=""
            if [ "$mode" = tune ]; then end=_lr${rate}_coef$coef; fi
            echo "$run $grpo --learning-rate $rate --kl-coef $coef --exp-name $name-grpo$end"
        done
        for pair in $ppo_pairs; do
            rate=${pair%,*}
            coef=${pair#*,}
            end=""
            if [ "$mode" = tune ]; then end=_lr${rate}_coef$coef; fi
            echo "$run $ppo --learning-rate $rate --kl-coef $coef --exp-name $name-ppo$end"
        done
    done << TABLE
isolated           3e-3,0.5  3e-3,0.5  --aggregation none
fedavg             3e-3,0.1  3e-3,0.5  --aggregation weights --communicator uniform
fedavg-private     3e-3,0.5  3e-3,0.5  --aggregation weights --communicator uniform --private-layers 1
pr-uniform         3e-3,0.1  3e-3,0.1  --communicator uniform
pr-uniform-linear  3e-3,0.1  3e-3,0.1  --communicator uniform --kl-schedule linear
pr-self0.6         3e-3,0.1  3e-3,0.1  --communicator self-preferred --self-preference 0.6
pr-self0.6-linear  3e-3,0.5  3e-3,0.1  --communicator self-preferred --self-preference 0.6 --kl-schedule linear
TABLE
done
