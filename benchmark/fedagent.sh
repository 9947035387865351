#!/usr/bin/env bash
# Table 1 of the FedAgent paper at its size, with PR-GRPO beside it: Qwen2.5-1.5B-Instruct in ALFWorld, 100
# clients of which two train in a round, 70 rounds of three epochs.
#
#   bash benchmark/fedagent.sh | python benchmark/run.py --jobs 1 --cores 8  15 runs, two GPUs each; not run yet
#
# text_worlds.sh has the same methods with a small model in a small world.
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

together="torchrun --nproc-per-node 2 prpo_babyai.py --agents-per-round 2"
alone="OMP_NUM_THREADS=1 python prpo_babyai.py --centralised"
for seed in 1 2 3; do
    flags="--base-model Qwen/Qwen2.5-1.5B-Instruct --precision bfloat16 --gradient-checkpointing"
    flags="$flags --env benchmark/worlds/alfworld.py:make --tasks 3000 --max-turns 50 --num-agents 100"
    flags="$flags --local-updates 3 --total-steps 210 --batch-size 8 --group-size 8 --max-prompt-tokens 2048"
    flags="$flags --response-length 512 --minibatch-size 64 --micro-batch-size 4 --learning-rate 1e-6"
    flags="$flags --weight-decay 0.01 --lora-rank 64 --lora-alpha 64 --advantage-over turns"
    flags="$flags --rollout-batch-size 0 --seed $seed --run-dir runs/fedagent"
    echo "$together --aggregation none $flags --exp-name local_iid"
    echo "$alone --aggregation none $flags --exp-name centralised_iid"
    echo "$together --aggregation weights $flags --exp-name fedagent_iid"
    echo "$together --aggregation policy $flags --exp-name pr-uniform-grpo_iid"
    echo "$together --aggregation policy --communicator self-preferred $flags --exp-name pr-self0.6-grpo_iid"
done
