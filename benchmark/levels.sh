#!/usr/bin/env bash
# Agents that have few levels each (docs/results/levels.md): three agents with 4, 16 or 64 levels of
# their own, evaluated on levels that nobody trains on.
#
#   bash benchmark/levels.sh | python benchmark/run.py       45 runs, half an hour on two cores
#   bash benchmark/levels.sh tune | python benchmark/run.py  36 runs, half an hour
#
# tune: four coefficients on a tuning seed, for
# `python benchmark/table.py --search --measure auc --runs runs/levels-tune`.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" coefs=0.5 block=0 folder=runs/levels-results ;;
    tune) seeds=101 coefs="0.1 0.2 0.5 2" block=15 folder=runs/levels-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
rooms=benchmark.levels:MultiRoom-N2-S4
for seed in $seeds; do
    for levels in 4 16 64; do
        first=$rooms-$levels-levels-$block-v0
        second=$rooms-$levels-levels-$((block + 1))-v0
        third=$rooms-$levels-levels-$((block + 2))-v0
        for coef in $coefs; do
            flags="--env-ids $first $second $third --eval-env-ids $rooms-unseen-v0 --seed $seed"
            flags="$flags --total-timesteps 122880 --learning-rate 1e-3 --kl-coef $coef --kl-direction reverse"
            flags="$flags --local-updates 4 --eval-episodes 50 --run-dir $folder"
            end=-$levels
            if [ "$mode" = tune ]; then end=-${levels}_coef$coef; fi
            echo "$prpo --communicator identity $flags --exp-name isolated$end"
            echo "$fedavg --communicator uniform $flags --exp-name fedavg-uniform$end"
            echo "$prpo --communicator uniform $flags --exp-name pr-uniform$end"
        done
    done
    block=$((block + 3)) # the next seed has levels of its own
done
