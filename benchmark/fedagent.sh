#!/usr/bin/env bash
# The FedAgent paper at its size, with PR-GRPO beside it: Qwen2.5-1.5B-Instruct in ALFWorld and in WebShop, 100
# clients of which two train in a round, 70 rounds of three epochs. Nothing of this has been run yet.
#
#   bash benchmark/fedagent.sh | python benchmark/run.py --jobs 1 --cores 8             30 runs, one or two GPUs each
#   bash benchmark/fedagent.sh figure3 | python benchmark/run.py --jobs 1 --cores 16    36 runs, one to four GPUs each
#   bash benchmark/fedagent.sh partitions | python benchmark/run.py --jobs 1 --cores 8  72 runs, two GPUs each
#
# Without a word: table 1. figure3: FedAgent with other numbers of tasks per client, clients per round, and
# epochs per round, one at a time; the paper's main setting (100, 2, 3) is in table 1. partitions: figure 4, the
# least and the most heterogeneity of each kind; coverage has 500 tasks per client on average, as in the
# paper's code.
#
# The learning rate is ten times the paper's 1e-6. That is a rate for all parameters, and here LoRA adapters
# are trained, whose best rate is about ten times as large, in reinforcement learning too ("LoRA Without
# Regret", Thinking Machines Lab, 2025). It has not been searched.
#
# text_worlds.sh has the same methods with a small model in a small world.
set -eu
mode=$*
case $mode in
    "" | figure3 | partitions) ;;
    *) echo "usage: bash $0 [figure3 | partitions]" >&2; exit 2 ;;
esac

script=prpo_babyai.py
together="torchrun --nproc-per-node 2 $script --agents-per-round 2"
fedagent="$together --aggregation weights"
uniform="$together --aggregation policy"
for seed in 1 2 3; do
    while read -r world turns prompt_tokens eval_episodes; do
        # A category of ALFWorld and WebShop is a kind of household task and of product
        flags="--base-model Qwen/Qwen2.5-1.5B-Instruct --precision bfloat16 --gradient-checkpointing"
        flags="$flags --env benchmark/worlds/$world.py:make --tasks 3000 --max-turns $turns --num-agents 100"
        flags="$flags --total-steps 210 --batch-size 8 --group-size 8 --max-prompt-tokens $prompt_tokens"
        flags="$flags --response-length 512 --minibatch-size 64 --micro-batch-size 4 --learning-rate 1e-5"
        flags="$flags --weight-decay 0.01 --lora-rank 64 --lora-alpha 64 --advantage-over turns"
        flags="$flags --rollout-batch-size 0 --eval-every 15 --eval-episodes $eval_episodes --seed $seed"
        flags="$flags --run-dir runs/fedagent"
        case $mode in
            "")
                alone="OMP_NUM_THREADS=1 python $script --centralised"
                self="$uniform --communicator self-preferred"
                echo "$together --aggregation none --local-updates 3 $flags --exp-name local_$world-iid"
                echo "$alone --aggregation none --local-updates 3 $flags --exp-name centralised_$world-iid"
                echo "$fedagent --local-updates 3 $flags --exp-name fedagent_$world-iid"
                echo "$uniform --local-updates 3 $flags --exp-name pr-uniform-grpo_$world-iid"
                echo "$self --local-updates 3 $flags --exp-name pr-self0.6-grpo_$world-iid"
                ;;
            figure3)
                averages="--aggregation weights"
                for tasks in 500 1000; do
                    name=fedagent_$world-tasks$tasks
                    echo "$fedagent --local-updates 3 --tasks-per-agent $tasks $flags --exp-name $name"
                done
                one="OMP_NUM_THREADS=1 python $script --agents-per-round 1 $averages"
                four="torchrun --nproc-per-node 4 $script --agents-per-round 4 $averages"
                echo "$one --local-updates 3 $flags --exp-name fedagent_$world-clients1"
                echo "$four --local-updates 3 $flags --exp-name fedagent_$world-clients4"
                for epochs in 1 5; do
                    echo "$fedagent --local-updates $epochs $flags --exp-name fedagent_$world-epochs$epochs"
                done
                ;;
            partitions)
                while read -r kind strength tasks; do
                    partition="--partition $kind --strength $strength --tasks-per-agent $tasks"
                    end=$world-$kind$strength
                    echo "$fedagent --local-updates 3 $partition $flags --exp-name fedagent_$end"
                    echo "$uniform --local-updates 3 $partition $flags --exp-name pr-uniform-grpo_$end"
                done << KINDS
preference  0.1  100
preference  0.9  100
coverage    256  500
coverage    1    500
hardness    256  100
hardness    1    100
KINDS
                ;;
        esac
    done << WORLDS
alfworld  50  2048  11
webshop   15  4096  13
WORLDS
done
