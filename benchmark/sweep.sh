#!/usr/bin/env bash
# Prints the training commands of a sweep, one per line; see --help.
set -euo pipefail

usage() {
    cat <<END
usage: bash benchmark/sweep.sh minigrid|atari|llm [--quick | --results]

Prints training commands, one per line, for a shell or a job array; runs nothing. The lines assume the root of the
repository as working directory; those of minigrid and atari use one core each (on a GPU machine several share a GPU):

    bash benchmark/sweep.sh minigrid --quick | xargs -P 2 -I{} sh -c '{}'
    python benchmark/plot.py --runs runs/minigrid-quick --out minigrid-quick

(default)  the paper's grid. minigrid, atari: table 2, three tasks or two games, ten seeds, five methods. llm: table 5,
           seven agents on TL;DR, one GPU each; the reward model is to be trained first and to lie in
           runs/reward-model, as \`trl reward\` writes it
--quick    a night on two cores. minigrid: two tasks, three seeds, two learning rates, 1 M steps; atari: BeamRider, two
           seeds, 1 M steps; llm: three agents and the small model on documentation
--results  the runs behind benchmark/results/: half an hour, three hours, an hour and a half on two cores

--exp-name tells the method and what is searched over. An estimate of the time goes to stderr.
END
}

family=${1:-} mode=${2:-}
case $family in
minigrid | atari | llm) ;;
--help | -h)
    usage
    exit 0
    ;;
*)
    echo "sweep.sh: unknown family '$family'; try --help" >&2
    exit 2
    ;;
esac
case $mode in
"" | --quick | --results) ;;
*)
    echo "sweep.sh: unknown option $mode; try --help" >&2
    exit 2
    ;;
esac
folder=runs/$family${mode/--/-}

# What is searched over. Seeds are outermost: a sweep that is cut off has whole seeds
SEEDS=(1 2 3 4 5 6 7 8 9 10)
RATES=(5e-5 1e-4 2.5e-4 5e-4 1e-3)
KL_COEFS=(0.5 1 2 5 10 20 50) # isolated agents and FedAvg
PEER_COEFS=(0.5 1 2 5 10 20)  # the paper's communication coefficient
COMMON=()
case $family$mode in
minigrid*)
    TASKS=(MiniGrid-FourRooms-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0)
    METHODS=(isolated fedavg-uniform fedavg-similarity pr-uniform pr-similarity)
    STEPS=5000000 SPEED=10000 # agent-steps per second on each of two cores
    ;;&
atari*)
    TASKS=(BeamRiderNoFrameskip-v4 AsterixNoFrameskip-v4)
    METHODS=(isolated fedavg-uniform fedavg-reward pr-uniform pr-reward)
    STEPS=10000000 SPEED=650
    ;;&
minigrid--quick)
    TASKS=(MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0) SEEDS=(1 2 3) STEPS=1000000
    RATES=(2.5e-4 1e-3) KL_COEFS=(0.5) PEER_COEFS=(0.5)
    ;;
minigrid--results)
    TASKS=(MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0) SEEDS=(1 2 3) STEPS=200000
    METHODS=(isolated isolated-no-penalty fedavg-uniform pr-uniform pr-similarity pr-reward pr-uniform-forward)
    RATES=(1e-3) KL_COEFS=(0.5) PEER_COEFS=(0.5) COMMON=(--local-updates 4)
    ;;
atari--quick)
    TASKS=(BeamRiderNoFrameskip-v4) SEEDS=(1 2) STEPS=1000000 RATES=(2.5e-4) KL_COEFS=(1) PEER_COEFS=(1)
    ;;
atari--results)
    TASKS=(BeamRiderNoFrameskip-v4) SEEDS=(1 2) STEPS=1001472 METHODS=(isolated pr-reward)
    RATES=(2.5e-4) KL_COEFS=(1) PEER_COEFS=(1) COMMON=(--eval-every 122)
    ;;
llm)
    LAUNCH="torchrun --nproc-per-node 7 prpo_llm.py --num-agents 7"
    PARTITIONS=(iid topic) METHODS=(isolated fedavg pr0.6 pr0.2) SEEDS=(1) KL_COEFS=(0.03 0.1 0.3) INTERVALS=(1 3 7)
    # Table 5: 64 prompts per step, 26 steps x 6 epochs, 32 prompts per optimizer step, two PPO epochs
    COMMON=(--base-model mistral-community/Mistral-7B-v0.2 --dataset trl-lib/tldr --reward-model runs/reward-model)
    COMMON+=(--batch-size 64 --minibatch-size 32 --micro-batch-size 8 --total-steps 156 --prompts-per-agent 1664)
    COMMON+=(--eval-prompts 128 --max-prompt-tokens 512 --missing-eos-penalty 3 --min-response-tokens 18)
    ;;
llm--*)
    LAUNCH="python prpo_llm.py"
    PARTITIONS=(topic) METHODS=(isolated fedavg pr0.6 pr0.2) SEEDS=(1 2) KL_COEFS=(0.1) INTERVALS=(3)
    COMMON=(--total-steps 40)
    ;;&
llm--results)
    METHODS=(isolated fedavg pr) SEEDS=(2 3)
    COMMON=(--total-steps 12 --learning-rate 1e-3 --max-prompt-tokens 128 --response-length 40)
    ;;
esac

control() {
    for seed in "${SEEDS[@]}"; do
        for task in "${TASKS[@]}"; do
            for method in "${METHODS[@]}"; do
                script=prpo_$family.py communicator=${method#*-} coefs=("${KL_COEFS[@]}") direction=()
                [[ $family$mode == minigrid--results && $method != *-forward ]] && direction=(--kl-direction reverse)
                case $method in
                isolated) communicator=identity ;;
                isolated-no-penalty) communicator=identity coefs=(0) ;;
                fedavg-*) script=fedavg_ppo.py ;;
                pr-*) communicator=${communicator%-forward} coefs=("${PEER_COEFS[@]}") ;;
                esac
                for rate in "${RATES[@]}"; do
                    for coef in "${coefs[@]}"; do
                        name=$method
                        [[ $mode == --results ]] || name+=_lr${rate}_coef$coef
                        echo "OMP_NUM_THREADS=1 python $script --communicator $communicator --env-id $task --seed $seed" \
                            "--total-timesteps $STEPS --learning-rate $rate --kl-coef $coef" \
                            "${direction[@]}" "${COMMON[@]}" "--run-dir $folder --exp-name $name"
                    done
                done
            done
        done
    done
    [[ $family$mode == minigrid--results ]] || return 0
    for seed in 1 2 3 4 5 6 7 8; do # one agent without penalty and value clipping, against stable-baselines3
        alone="--env-id MiniGrid-DoorKey-6x6-v0 --seed $seed --total-timesteps $STEPS --learning-rate 1e-3 --no-clip-vloss --eval-episodes 20 --run-dir runs/sb3"
        echo "OMP_NUM_THREADS=1 python benchmark/baselines/sb3_ppo.py $alone --exp-name sb3"
        echo "OMP_NUM_THREADS=1 python prpo_minigrid.py --communicator identity --num-agents 1 --kl-coef 0 $alone --exp-name isolated"
    done
}

llm() {
    for seed in "${SEEDS[@]}"; do
        for algorithm in grpo ppo; do
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
                            name=${algorithm}_${partition}_${method}_kl${coef}_every$interval size=()
                            if [[ $mode == --results ]]; then
                                prompts=$([[ $algorithm == grpo ]] && echo 2 || echo 6)
                                name=$method-$algorithm size=(--batch-size "$prompts" --micro-batch-size "$prompts")
                            fi
                            echo "$LAUNCH --algorithm $algorithm --partition $partition $aggregation --kl-coef $coef" \
                                "--local-updates $interval --seed $seed" "${size[@]}" "${COMMON[@]}" \
                                "--run-dir $folder --exp-name $name"
                        done
                    done
                done
            done
        done
    done
}

if [[ $family == llm ]]; then
    llm | tee >(wc -l | sed 's/$/ runs/' >&2)
else
    control | tee >(awk -v each=$((STEPS * 3 / SPEED / 2)) \
        '{ n++ } END { printf "%d runs, about %.1f h on two cores\n", n, n * each / 3600 }' >&2)
fi
