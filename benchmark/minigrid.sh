#!/usr/bin/env bash
# The commands of the paper's table 2 on MiniGrid, one per line; see --help.
set -euo pipefail

ENVS=(MiniGrid-FourRooms-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0)
SEEDS=(1 2 3 4 5 6 7 8 9 10)
STEPS=5000000
RATES=(5e-5 1e-4 2.5e-4 5e-4 1e-3)
KL_COEFS=(0.5 1 2 5 10 20 50)
COMMUNICATION_COEFS=(0.5 1 2 5 10 20)
RUN_DIR=runs/minigrid
AGENTS=3 # the scripts' default
SPEED=5000 # agent-steps/s of one process on one core, for the estimate
CORES=2

usage() {
    cat <<END
usage: bash benchmark/minigrid.sh [--quick] [--help]

Prints training commands, one per line, for a shell or a job array; runs nothing. The lines assume the root of the
repository as working directory (this script itself may be called from anywhere) and use one core each:

    bash benchmark/minigrid.sh --quick | xargs -P 2 -I{} sh -c '{}'
    python benchmark/plot.py --runs $RUN_DIR-quick --out benchmark/results/minigrid

(default)  the grid of the paper's table 2: ${#ENVS[@]} environments, ${#SEEDS[@]} seeds, $AGENTS agents, $STEPS steps each;
           isolated PPO, FedAvg (uniform, similarity), PR-PPO (uniform, similarity); ${#RATES[@]} learning rates times
           ${#KL_COEFS[@]} KL coefficients (isolated, FedAvg) or ${#COMMUNICATION_COEFS[@]} communication coefficients (PR-PPO)
--quick    DoorKey-6x6 and DistShift2, the same five methods at one setting, three seeds, 2000000 steps: one night on
           two cores
--help     this text

An estimate of the time goes to stderr. --exp-name tells method, learning rate and coefficient.
END
}

for option in "$@"; do
    case $option in
    --quick)
        ENVS=(MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0)
        SEEDS=(1 2 3)
        STEPS=2000000
        RATES=(2.5e-4)
        KL_COEFS=(1)
        COMMUNICATION_COEFS=(1)
        RUN_DIR=runs/minigrid-quick
        ;;
    --help | -h)
        usage
        exit 0
        ;;
    *)
        echo "minigrid.sh: unknown option $option; try --help" >&2
        exit 2
        ;;
    esac
done

lines=()
add() { # method, script with its communicator, coefficient's flag, coefficients
    local method=$1 script=$2 flag=$3 rate coef
    shift 3
    for rate in "${RATES[@]}"; do
        for coef in "$@"; do
            lines+=("OMP_NUM_THREADS=1 python $script --env-id $env --seed $seed --total-timesteps $STEPS --learning-rate $rate $flag $coef --exp-name ${method}_lr${rate}_coef$coef --run-dir $RUN_DIR")
        done
    done
}

for seed in "${SEEDS[@]}"; do # seeds outermost: a sweep that is cut off has whole seeds
    for env in "${ENVS[@]}"; do
        add isolated "prpo_minigrid.py --communicator identity" --kl-coef "${KL_COEFS[@]}"
        for communicator in uniform similarity; do
            add "fedavg-$communicator" "fedavg_ppo.py --communicator $communicator" --kl-coef "${KL_COEFS[@]}"
            add "pr-$communicator" "prpo_minigrid.py --communicator $communicator" --communication-coef "${COMMUNICATION_COEFS[@]}"
        done
    done
done

seconds=$((STEPS * AGENTS / SPEED)) # of one run
hours=$(((${#lines[@]} * seconds / CORES + 1800) / 3600))
echo "${#lines[@]} runs of $((seconds / 60)) min each at $SPEED agent-steps/s on one core: $hours h on $CORES cores" >&2
printf '%s\n' "${lines[@]}"
