#!/usr/bin/env bash
# The paper's table 5: seven agents on TL;DR, four methods with PPO and GRPO, one seed. Where the paper is silent,
# the settings are those of its released code; docs/prpo_llm.md lists them, and what no flag gives.
#
#   bash benchmark/llm.sh | python benchmark/run.py --jobs 1 --cores 8  144 runs, a GPU of 80 GB for each agent
#   bash benchmark/llm.sh quick | python benchmark/run.py               16 runs of a small model, a night on two cores
#
# benchmark/llm_memory.py counts the memory; benchmark/pipeline.sh trains the reward model. 156 steps are 26
# for each of six epochs, of 64 completions each: 8 prompts with a group of 8 each, or 64 prompts with PPO.
# PPO's KL is in the reward. quick has three agents on documentation, whose model and data need no hub, and
# the script's own defaults.
set -eu
case $* in
    "")
        llm="torchrun --nproc-per-node 7 prpo_llm.py --num-agents 7"
        model="--base-model mistral-community/Mistral-7B-v0.2 --reward runs/tldr/reward"
        model="$model --lora-targets q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
        data="--dataset 'trl-lib/tldr:train[16722:]' --eval-dataset trl-lib/tldr:validation --topics loseit"
        data="$data dating_advice legaladvice offmychest personalfinance relationship_advice tifu"
        size="--total-steps 156 --eval-prompts 128 --eval-samples 1 --max-prompt-tokens 512"
        rewards="--norm-reward off --missing-eos-reward -3 --min-response-tokens 19"
        update="--mixture geometric --weight-decay 0.01 --max-grad-norm 1e9"
        flags="$model $data $size $rewards $update --run-dir runs/llm"
        grpo="--batch-size 8 --minibatch-size 4 --micro-batch-size 1 --prompts-per-agent 208"
        grpo="$grpo --loss-type dapo --kl-estimator k3 --kl-coef"
        ppo="--batch-size 64 --minibatch-size 32 --micro-batch-size 8 --prompts-per-agent 1664"
        ppo="$ppo --value-init runs/tldr/value-adapter --value-lora-rank 32 --value-lora-alpha 64"
        ppo="$ppo --gradient-checkpointing --kl-coef 0 --reward-kl-coef"
        seeds=1
        partitions="iid topic"
        coefs="0.03 0.1 0.3"
        intervals="1 3 7"
        ;;
    quick)
        llm="python prpo_llm.py"
        flags="--total-steps 40 --learning-rate 1e-3 --topics torch sympy transformers --run-dir runs/llm-quick"
        grpo=--kl-coef
        ppo=--kl-coef
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
                    run="$llm --algorithm $algorithm --partition $partition ${!algorithm} $coef"
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
