#!/usr/bin/env bash
# The paper's table 1 at small scale (docs/pipeline.md): a small model on documentation, three agents, from
# the adapter and with the reward model of `bash benchmark/pipeline.sh all --quick`.
#
#   bash benchmark/table1.sh | python benchmark/run.py        180 runs, more than a day on two cores
#   bash benchmark/table1.sh quick | python benchmark/run.py  20 runs, two and a quarter hours
set -eu
case $* in
    "") seeds="1 2 3" coefs="0.03 0.1 0.3" folder=runs/table1 ;;
    quick) seeds=1 coefs=0.1 folder=runs/table1-quick ;;
    *) echo "usage: bash $0 [quick]" >&2; exit 2 ;;
esac

docstrings="--base-model runs/docstrings/base --adapter runs/docstrings/sft-adapter"
docstrings="$docstrings --reward runs/docstrings/reward --dataset runs/docstrings/prompts.jsonl"
averages="--aggregation weights --communicator uniform"
mixture="--aggregation policy --communicator self-preferred --self-preference"
for seed in $seeds; do
    for algorithm in grpo ppo; do
        prompts=2 # of a step
        if [ $algorithm = ppo ]; then prompts=6; fi
        for partition in iid topic; do
            for coef in $coefs; do
                run="python prpo_llm.py --algorithm $algorithm --partition $partition --kl-coef $coef"
                run="$run --local-updates 3 --seed $seed --batch-size $prompts --micro-batch-size $prompts"
                run="$run $docstrings --prompts-per-agent 64 --total-steps 12 --learning-rate 3e-4"
                run="$run --max-prompt-tokens 128 --response-length 40 --eval-prompts 16 --run-dir $folder"
                end=${algorithm}_kl${coef}_every3
                echo "$run --aggregation none --exp-name isolated-$end"
                echo "$run $averages --exp-name fedavg-$end"
                echo "$run $averages --lora-average naive --exp-name fedavg-naive-$end"
                echo "$run $mixture 0.6 --exp-name pr0.6-$end"
                echo "$run $mixture 0.2 --exp-name pr0.2-$end"
            done
        done
    done
done
