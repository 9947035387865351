#!/usr/bin/env bash
# Prints the training commands of a language-model sweep, one per line; see --help.
set -euo pipefail

ALGORITHMS=(grpo ppo)
PARTITIONS=(iid topic)
METHODS=(isolated fedavg pr0.6 pr0.2)
SEEDS=(1)
KL_COEFS=(0.03 0.1 0.3)
INTERVALS=(1 3 7)
LAUNCH="torchrun --nproc-per-node 7 prpo_llm.py --num-agents 7"
# Table 5: 64 prompts per step, 26 steps x 6 epochs, 32 prompts per optimizer step, two PPO epochs
COMMON="--base-model mistral-community/Mistral-7B-v0.2 --dataset trl-lib/tldr --reward-model runs/reward-model --batch-size 64 --minibatch-size 32 --micro-batch-size 8 --total-steps 156 --prompts-per-agent 1664 --eval-prompts 128 --max-prompt-tokens 512 --missing-eos-penalty 3 --min-response-tokens 18 --run-dir runs/llm"

usage() {
    cat <<END
usage: bash benchmark/llm.sh [--quick | --results] [--help]

Prints training commands, one per line, for a shell or a job array; runs nothing. The lines assume the root of the
repository as working directory:

    bash benchmark/llm.sh --quick | xargs -P 1 -I{} sh -c '{}'

(default)  the grid of the paper's table 5: seven agents on TL;DR, one GPU each; the reward model is to be trained first
           and to lie in runs/reward-model, as \`trl reward\` writes it
--quick    three agents and the small model on documentation, for two cores: a night
--results  six methods, two seeds, 12 steps of 48 short completions (PPO: 18), to compare briefly: an hour and a half on two cores
--help     this text

--exp-name tells algorithm, data, method, KL coefficient and steps between reference updates.
END
}

case ${1:-} in
"") ;;
--quick)
    PARTITIONS=(topic) SEEDS=(1 2) KL_COEFS=(0.1) INTERVALS=(3)
    LAUNCH="python prpo_llm.py" COMMON="--total-steps 40 --run-dir runs/llm-quick"
    ;;
--results)
    PARTITIONS=(topic) METHODS=(isolated fedavg pr) SEEDS=(2 3) KL_COEFS=(0.1) INTERVALS=(3)
    LAUNCH="python prpo_llm.py" COMMON="--total-steps 12 --learning-rate 1e-3 --max-prompt-tokens 128 --response-length 40 --run-dir runs/llm-results"
    ;;
--help | -h)
    usage
    exit 0
    ;;
*)
    echo "llm.sh: unknown option $1; try --help" >&2
    exit 2
    ;;
esac

number=0
for seed in "${SEEDS[@]}"; do # seeds outermost: a sweep that is cut off has whole seeds
    for algorithm in "${ALGORITHMS[@]}"; do
        for partition in "${PARTITIONS[@]}"; do
            for method in "${METHODS[@]}"; do
                case $method in
                isolated) aggregation="--aggregation none" ;;
                fedavg) aggregation="--aggregation weights --communicator uniform" ;;
                pr) aggregation="--aggregation policy --communicator uniform" ;;
                pr*) aggregation="--aggregation policy --communicator self-preferred --self-preference ${method#pr}" ;;
                esac
                for coef in "${KL_COEFS[@]}"; do
                    for interval in "${INTERVALS[@]}"; do
                        name=${algorithm}_${partition}_${method}_kl${coef}_every$interval
                        size=
                        if [[ ${1:-} == --results ]]; then
                            name=$method-$algorithm
                            [[ $algorithm == grpo ]] && prompts=2 || prompts=6
                            size="--batch-size $prompts --micro-batch-size $prompts "
                        fi
                        echo "$LAUNCH --algorithm $algorithm --partition $partition $aggregation --kl-coef $coef --update-every $interval --seed $seed $size$COMMON --exp-name $name"
                        number=$((number + 1))
                    done
                done
            done
        done
    done
done
echo "$number runs" >&2
