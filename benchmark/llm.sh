#!/usr/bin/env bash
# The paper's table 5: seven agents on TL;DR, four methods with PPO and GRPO, one seed.
#
#   bash benchmark/llm.sh | python benchmark/run.py --jobs 1 --cores 8  144 runs, a GPU of 80 GB for each agent
#   bash benchmark/llm.sh quick | python benchmark/run.py               16 runs of a small model, a night on two cores
#
# benchmark/llm_memory.py counts the memory; benchmark/pipeline.sh trains the reward model. 156 steps are 26
# for each of six epochs. quick has three agents on documentation, whose model and data need no hub.
set -eu
case $* in
    "")
        llm="torchrun --nproc-per-node 7 prpo_llm.py --num-agents 7"
        model="--base-model mistral-community/Mistral-7B-v0.2 --reward runs/tldr/reward --gradient-checkpointing"
        data="--dataset trl-lib/tldr --eval-dataset trl-lib/tldr:validation --topics loseit dating_advice"
        data="$data legaladvice offmychest personalfinance relationship_advice tifu"
        size="--total-steps 156 --batch-size 64 --minibatch-size 32 --micro-batch-size 8 --prompts-per-agent 1664"
        size="$size --eval-prompts 128 --max-prompt-tokens 512 --missing-eos-penalty 3 --min-response-tokens 18"
        flags="$model $data $size --run-dir runs/llm"
        seeds=1
        partitions="iid topic"
        coefs="0.03 0.1 0.3"
        intervals="1 3 7"
        ;;
    quick)
        llm="python prpo_llm.py"
        flags="--total-steps 40 --learning-rate 1e-3 --topics torch sympy transformers --run-dir runs/llm-quick"
        seeds="1 2"
        partitions=topic
        coefs=0.1
        intervals=3
        ;;
    *) echo "usage: bash $0 [quick]" >&2; exit 2 ;;
esac

averages="--aggregation weights --communicator uniform"
mixture="--aggregation policy --communicator self-preferred --self-preference"
for seed in $seeds; do
    for algorithm in grpo ppo; do
        for partition in $partitions; do
            for coef in $coefs; do
                for interval in $intervals; do
                    run="$llm --algorithm $algorithm --partition $partition --kl-coef $coef"
                    run="$run --local-updates $interval --seed $seed $flags"
                    end=${algorithm}_kl${coef}_every$interval
                    echo "$run --aggregation none --exp-name isolated-$end"
                    echo "$run $averages --exp-name fedavg-$end"
                    echo "$run $mixture 0.6 --exp-name pr0.6-$end"
                    echo "$run $mixture 0.2 --exp-name pr0.2-$end"
                done
            done
        done
    done
done
