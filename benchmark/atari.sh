#!/usr/bin/env bash
# Prints the training commands of an Atari sweep, one per line; see --help.
set -euo pipefail

GAMES=(BeamRiderNoFrameskip-v4 AsterixNoFrameskip-v4)
SEEDS=(1 2 3 4 5 6 7 8 9 10)
METHODS=(isolated fedavg-uniform fedavg-reward pr-uniform pr-reward)
STEPS=10000000
RATES=(5e-5 1e-4 2.5e-4 5e-4 1e-3)
KL_COEFS=(0.5 1 2 5 10 20 50)
COMMUNICATION_COEFS=(0.5 1 2 5 10 20)
COMMON="--run-dir runs/atari"

usage() {
    cat <<END
usage: bash benchmark/atari.sh [--quick | --results] [--help]

Prints training commands, one per line, for a shell or a job array; runs nothing. The lines assume the root of the
repository as working directory; on a CPU they use one core each, on a GPU machine several may share a GPU:

    bash benchmark/atari.sh --quick | xargs -P 2 -I{} sh -c '{}'
    python benchmark/plot.py --runs runs/atari-quick --out atari-quick

(default)  the grid of the paper's table 2: two games, ten seeds, five methods, 10 M steps per agent
--quick    BeamRider, two seeds, five methods, 1 M steps: a night on two cores
--results  the runs behind benchmark/results/atari*: some three hours on two cores
--help     this text

--exp-name tells method, learning rate and coefficient. An estimate of the time goes to stderr.
END
}

case ${1:-} in
"") ;;
--quick)
    GAMES=(BeamRiderNoFrameskip-v4) SEEDS=(1 2) STEPS=1000000
    RATES=(2.5e-4) KL_COEFS=(1) COMMUNICATION_COEFS=(1) COMMON="--run-dir runs/atari-quick"
    ;;
--results)
    GAMES=(BeamRiderNoFrameskip-v4) SEEDS=(1 2) STEPS=1001472 METHODS=(isolated pr-reward)
    RATES=(2.5e-4) KL_COEFS=(1) COMMUNICATION_COEFS=(1) COMMON="--eval-every 122 --run-dir runs/atari-results"
    ;;
--help | -h)
    usage
    exit 0
    ;;
*)
    echo "atari.sh: unknown option $1; try --help" >&2
    exit 2
    ;;
esac

lines=()
for seed in "${SEEDS[@]}"; do # seeds outermost: a sweep that is cut off has whole seeds
    for game in "${GAMES[@]}"; do
        for method in "${METHODS[@]}"; do
            script=prpo_atari.py coefs=("${KL_COEFS[@]}") communicator=${method#*-}
            case $method in
            isolated) communicator=identity ;;
            fedavg-*) script=fedavg_ppo.py ;;
            pr-*) coefs=("${COMMUNICATION_COEFS[@]}") ;;
            esac
            for rate in "${RATES[@]}"; do
                for coef in "${coefs[@]}"; do
                    name=$method$([[ ${1:-} == --results ]] || echo "_lr${rate}_coef$coef")
                    lines+=("OMP_NUM_THREADS=1 python $script --communicator $communicator --env-id $game --seed $seed --total-timesteps $STEPS --learning-rate $rate --kl-coef $coef $COMMON --exp-name $name")
                done
            done
        done
    done
done

hours=$((${#lines[@]} * STEPS * 3 / 650 / 2 / 3600)) # three agents, 650 agent-steps/s on each of two cores
echo "${#lines[@]} runs, about $hours h on two cores" >&2
printf '%s\n' "${lines[@]}"
