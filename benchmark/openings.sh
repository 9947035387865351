#!/usr/bin/env bash
# A real model with preferences of its own (docs/results/language_models.md): three agents summarise documentation with
# SmolLM2-135M-Instruct, rewarded for ROUGE-L and, each, for another way to begin (benchmark/openings.py). First
# run `python benchmark/openings.py`.
#
#   bash benchmark/openings.sh | python benchmark/run.py --jobs 3  12 runs, an hour on two busy cores
#   bash benchmark/openings.sh tune | python benchmark/run.py      2 runs of some ten minutes
#
# tune: two learning rates of isolated agents on a tuning seed; the better one is that of all methods.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3" rates=1e-3 folder=runs/openings-results ;;
    tune) seeds=101 rates="1e-3 3e-3" folder=runs/openings-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

task="--max-prompt-tokens 96 --prompts-per-agent 128 --response-length 16 --missing-eos-penalty 0.5"
task="$task --reward rouge benchmark/openings.py:verb benchmark/openings.py:article benchmark/openings.py:this"
task="$task --reward-weights runs/openings/weights.csv"
size="--total-steps 10 --local-updates 2 --batch-size 3 --minibatch-size 1 --update-epochs 1 --lora-rank 8"
flags="$task $size --kl-schedule linear --eval-prompts 24 --log-completions 3 --save-every 2 --run-dir $folder"
for seed in $seeds; do
    for rate in $rates; do
        while read -r name method; do
            end=""
            if [ "$mode" = tune ]; then
                if [ "$name" != isolated-grpo ]; then continue; fi
                end=_lr$rate
            fi
            run="python prpo_llm.py $method $flags --learning-rate $rate --seed $seed --exp-name $name$end"
            echo "$run"
        done << TABLE
pr-uniform-linear-grpo  --communicator uniform
pr-reward-linear-grpo   --communicator reward
isolated-grpo           --aggregation none
fedavg-grpo             --aggregation weights --communicator uniform
TABLE
    done
done
