#!/usr/bin/env bash
# The layout of the paper's table 1 on string skills (docs/results/language_models.md): a tiny model, three
# agents. First run `python benchmark/skills.py`.
#
#   bash benchmark/table1_skills.sh | python benchmark/run.py  180 runs, 35 minutes on two cores
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

skills="--base-model runs/skills/model --dataset runs/skills/train.jsonl --reward benchmark/skills.py:exact"
skills="$skills --missing-eos-penalty 0 --precision float32 --temperature 1 --response-length 13"
skills="$skills --lora-rank 8 --prompts-per-agent 400 --eval-prompts 40 --run-dir runs/table1-skills"
averages="--aggregation weights --communicator uniform --learning-rate 3e-3"
mixture="--aggregation policy --learning-rate 1e-3 --communicator self-preferred --self-preference"
for seed in 1 2 3; do
    for algorithm in grpo ppo; do
        prompts=8 # of a step: as many completions with both algorithms
        if [ $algorithm = ppo ]; then prompts=64; fi
        for partition in iid topic; do
            for coef in 0.03 0.1 0.3; do
                run="OMP_NUM_THREADS=1 python prpo_llm.py --algorithm $algorithm --partition $partition"
                run="$run --kl-coef $coef --local-updates 1 --seed $seed --batch-size $prompts"
                run="$run --micro-batch-size $prompts $skills"
                end=${algorithm}_kl${coef}_every1
                echo "$run --aggregation none --learning-rate 1e-3 --exp-name isolated-$end"
                echo "$run $averages --exp-name fedavg-$end"
                echo "$run $averages --lora-average naive --exp-name fedavg-naive-$end"
                echo "$run $mixture 0.6 --exp-name pr0.6-$end"
                echo "$run $mixture 0.2 --exp-name pr0.2-$end"
            done
        done
    done
done
