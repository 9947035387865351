#!/usr/bin/env bash
# Isolated agents and PR-PPO on BeamRider, 1 M steps and two seeds: the results of docs/prpo_atari.md.
#
#   bash benchmark/beamrider.sh | python benchmark/run.py  4 runs, two and a half hours on two cores
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

prpo="OMP_NUM_THREADS=1 python prpo_atari.py"
flags="--env-id BeamRiderNoFrameskip-v4 --total-timesteps 1001472 --learning-rate 2.5e-4 --kl-coef 1"
flags="$flags --kl-direction forward --local-updates 16 --eval-every 122 --run-dir runs/atari-results"
for seed in 1 2; do
    echo "$prpo --communicator identity $flags --seed $seed --exp-name isolated"
    echo "$prpo --communicator reward $flags --seed $seed --exp-name pr-reward"
done
