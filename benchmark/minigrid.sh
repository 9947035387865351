#!/usr/bin/env bash
# Prints the training commands of a MiniGrid sweep, one per line; see --help.
set -euo pipefail

ENVS=(MiniGrid-FourRooms-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0)
SEEDS=(1 2 3 4 5 6 7 8 9 10)
METHODS=(isolated fedavg-uniform fedavg-similarity pr-uniform pr-similarity)
STEPS=5000000
RATES=(5e-5 1e-4 2.5e-4 5e-4 1e-3)
KL_COEFS=(0.5 1 2 5 10 20 50)
COMMUNICATION_COEFS=(0.5 1 2 5 10 20)
COMMON="--run-dir runs/minigrid"

usage() {
    cat <<END
usage: bash benchmark/minigrid.sh [--quick | --results] [--help]

Prints training commands, one per line, for a shell or a job array; runs nothing. The lines assume the root of the
repository as working directory and use one core each:

    bash benchmark/minigrid.sh --quick | xargs -P 2 -I{} sh -c '{}'
    python benchmark/plot.py --runs runs/minigrid-quick --out minigrid-quick

(default)  the grid of the paper's table 2: three environments, ten seeds, five methods, 5 M steps per agent
--quick    DoorKey-6x6 and DistShift2, three seeds, five methods, two learning rates, 1 M steps: a night on two cores
--results  the runs behind benchmark/results/: about an hour on two cores
--help     this text

--exp-name tells method, learning rate and coefficient. An estimate of the time goes to stderr.
END
}

case ${1:-} in
"") ;;
--quick)
    ENVS=(MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0) SEEDS=(1 2 3) STEPS=1000000
    RATES=(2.5e-4 1e-3) KL_COEFS=(0.5) COMMUNICATION_COEFS=(0.5) COMMON="--run-dir runs/minigrid-quick"
    ;;
--results)
    ENVS=(MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0) SEEDS=(1 2 3) STEPS=200000
    METHODS=(isolated isolated-no-penalty fedavg-uniform pr-uniform pr-similarity pr-reward pr-uniform-forward)
    RATES=(1e-3) KL_COEFS=(0.5) COMMUNICATION_COEFS=(0.5) COMMON="--local-updates 4 --run-dir runs/results"
    ;;
--help | -h)
    usage
    exit 0
    ;;
*)
    echo "minigrid.sh: unknown option $1; try --help" >&2
    exit 2
    ;;
esac

lines=()
for seed in "${SEEDS[@]}"; do # seeds outermost: a sweep that is cut off has whole seeds
    for env in "${ENVS[@]}"; do
        for method in "${METHODS[@]}"; do
            script=prpo_minigrid.py coefs=("${KL_COEFS[@]}")
            direction=$([[ ${1:-} == --results && $method != *-forward ]] && echo "--kl-direction reverse " || true)
            case $method in
            isolated) communicator=identity ;;
            isolated-no-penalty) communicator=identity coefs=(0) ;;
            fedavg-*) script=fedavg_ppo.py communicator=${method#fedavg-} ;;
            pr-*) communicator=${method#pr-} communicator=${communicator%-forward} coefs=("${COMMUNICATION_COEFS[@]}") ;;
            esac
            for rate in "${RATES[@]}"; do
                for coef in "${coefs[@]}"; do
                    name=$method$([[ ${1:-} == --results ]] || echo "_lr${rate}_coef$coef")
                    lines+=("OMP_NUM_THREADS=1 python $script --communicator $communicator --env-id $env --seed $seed --total-timesteps $STEPS --learning-rate $rate --kl-coef $coef $direction$COMMON --exp-name $name")
                done
            done
        done
    done
done
if [[ ${1:-} == --results ]]; then # one agent without penalty and value clipping, against stable-baselines3
    for seed in 1 2 3 4 5 6 7 8; do
        alone="--env-id MiniGrid-DoorKey-6x6-v0 --seed $seed --total-timesteps $STEPS --learning-rate 1e-3 --no-clip-vloss --eval-episodes 20 --run-dir runs/sb3"
        lines+=("OMP_NUM_THREADS=1 python benchmark/sb3_ppo.py $alone --exp-name sb3")
        lines+=("OMP_NUM_THREADS=1 python prpo_minigrid.py --communicator identity --num-agents 1 --kl-coef 0 $alone --exp-name isolated")
    done
fi

minutes=$((${#lines[@]} * STEPS * 3 / 5000 / 2 / 60)) # three agents, 5000 agent-steps/s on each of two cores
echo "${#lines[@]} runs, about $((minutes / 60)) h $((minutes % 60)) min on two cores" >&2
printf '%s\n' "${lines[@]}"
