#!/usr/bin/env bash
# FourRooms at the paper's length (docs/results.md, section 11): 5 M steps, five seeds.
#
#   bash benchmark/fourrooms_5m.sh | python benchmark/run.py           35 runs, nine hours on two cores
#   bash benchmark/fourrooms_5m.sh searched | python benchmark/run.py  20 runs, five hours
#
# searched: the settings that the search of `minigrid.sh tune` prefers where they are others
# (`python benchmark/table.py --search --runs runs/minigrid-tune`), and FedAvg with the learning rate
# that it prefers for the other methods.
set -eu
mode=$*
case $mode in
    "" | searched) ;;
    *) echo "usage: bash $0 [searched]" >&2; exit 2 ;;
esac

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
for seed in 1 2 3 4 5; do
    flags="--env-id MiniGrid-FourRooms-v0 --seed $seed --total-timesteps 5000000 --local-updates 4"
    flags="$flags --run-dir runs/fourrooms-5m"
    reverse="$flags --kl-direction reverse"
    forward="$flags --kl-direction forward"
    if [ "$mode" = searched ]; then
        rate="--learning-rate 5e-4 --kl-coef 0.5"
        coef="--learning-rate 1e-3 --kl-coef 2"
        echo "$prpo --communicator identity $reverse $rate --exp-name isolated-searched"
        echo "$fedavg --communicator uniform $reverse $coef --exp-name fedavg-uniform-searched"
        echo "$fedavg --communicator uniform $reverse $rate --exp-name fedavg-uniform-lr5e-4"
        echo "$prpo --communicator uniform $reverse $rate --exp-name pr-uniform-searched"
    else
        setting="--learning-rate 1e-3 --kl-coef 0.5"
        echo "$prpo --communicator identity $reverse $setting --exp-name isolated"
        echo "$fedavg --communicator uniform $reverse $setting --exp-name fedavg-uniform"
        echo "$fedavg --communicator similarity $reverse $setting --exp-name fedavg-similarity"
        echo "$prpo --communicator uniform $reverse $setting --exp-name pr-uniform"
        echo "$prpo --communicator similarity $reverse $setting --exp-name pr-similarity"
        echo "$prpo --communicator uniform $forward $setting --exp-name pr-uniform-forward"
        echo "$prpo --communicator similarity $forward $setting --exp-name pr-similarity-forward"
    fi
done
