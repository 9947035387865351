#!/usr/bin/env bash
# A trust region, and fresh snapshots (docs/results/trust_region.md): PR-TRPO, isolated TRPO and PR-PPO on
# three settings, and how far PR-TRPO's updates move, with and without the bound of --delta.
#
#   bash benchmark/trpo.sh | python benchmark/run.py  75 runs, an hour and a half on two cores
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

trpo="OMP_NUM_THREADS=1 python prtrpo_minigrid.py"
prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
for seed in 1 2 3 4 5; do
    for experiment in doorkey6x6 fourrooms doorkey; do
        case $experiment in
            doorkey6x6) task="--env-id MiniGrid-DoorKey-6x6-v0" ;;
            fourrooms) task="--env-id MiniGrid-FourRooms-v0" ;;
            doorkey) task="--env-ids MiniGrid-DoorKey-5x5-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DoorKey-8x8-v0" ;;
        esac
        flags="$task --seed $seed --total-timesteps 122880 --eval-episodes 50 --run-dir runs/trpo-results/$experiment"
        echo "$trpo --communicator identity --local-updates 4 $flags --exp-name isolated-trpo"
        echo "$trpo --local-updates 4 $flags --exp-name pr-trpo"
        echo "$trpo --local-updates 1 $flags --exp-name pr-trpo-every1" # as Observation 1 has it
        settings="--learning-rate 1e-3 --kl-coef 0.5 --kl-direction reverse --local-updates 4" # of doorkey.sh
        echo "$prpo $settings $flags --exp-name pr-uniform"
    done
    flags="--env-id MiniGrid-DoorKey-5x5-v0 --seed $seed --total-timesteps 61440 --eval-episodes 50"
    flags="$flags --local-updates 1 --run-dir runs/trpo-results/bound"
    echo "$trpo $flags --exp-name fixed"
    echo "$trpo --delta 0.2 $flags --exp-name bounded"
    echo "$trpo --delta 0.1 $flags --exp-name tight"
done
