#!/usr/bin/env bash
# Three small language models on documentation of libraries of their own: the results of docs/prpo_llm.md.
#
#   bash benchmark/documentation.sh | python benchmark/run.py  12 runs, an hour and a half on two cores
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

for seed in 2 3; do
    for algorithm in grpo ppo; do
        prompts=2 # of a step
        if [ $algorithm = ppo ]; then prompts=6; fi
        run="python prpo_llm.py --algorithm $algorithm --partition topic --topics torch sympy transformers"
        run="$run --kl-coef 0.1 --learning-rate 1e-3 --total-steps 12 --local-updates 3 --seed $seed"
        run="$run --batch-size $prompts --micro-batch-size $prompts --max-prompt-tokens 128 --response-length 40"
        run="$run --run-dir runs/llm-results"
        echo "$run --aggregation none --exp-name isolated-$algorithm"
        echo "$run --aggregation weights --communicator uniform --exp-name fedavg-$algorithm"
        echo "$run --aggregation policy --communicator uniform --exp-name pr-$algorithm"
    done
done
