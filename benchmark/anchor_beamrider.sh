#!/usr/bin/env bash
# As anchor.sh, on BeamRider with table 2's settings, for 131,072 steps (docs/results/rounds.md).
#
#   bash benchmark/anchor_beamrider.sh | python benchmark/run.py  12 runs, an hour on two cores
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

prpo="OMP_NUM_THREADS=1 python prpo_atari.py"
for seed in 1 2 3; do
    flags="--env-id BeamRiderNoFrameskip-v4 --total-timesteps 131072 --save-every 16 --eval-episodes 0"
    flags="$flags --seed $seed --run-dir runs/anchor-results/beamrider"
    echo "$prpo $flags --communicator identity --exp-name isolated"
    echo "$prpo $flags --communicator identity --self-reference snapshot --kl-coef 0.6667 --exp-name isolated-snapshot"
    echo "$prpo $flags --communicator uniform --exp-name pr-uniform"
    echo "$prpo $flags --communicator uniform --local-updates 1 --exp-name pr-uniform-every1"
done
