#!/usr/bin/env bash
# Peers that lie (docs/results/broken_peers.md): every method where one agent of four sends what it has
# not learned.
#
#   bash benchmark/liars.sh | python benchmark/run.py  220 runs, over two hours on two cores
set -eu
[ $# = 0 ] || { echo "usage: bash $0" >&2; exit 2; }

liars="OMP_NUM_THREADS=1 python benchmark/liars.py"
for seed in 1 2 3 4 5; do
    flags="--seed $seed --total-timesteps 122880 --learning-rate 1e-3 --kl-coef 0.5 --kl-direction reverse"
    flags="$flags --local-updates 4 --eval-episodes 0 --run-dir runs/liars-results"
    for lie in none random flipped opposite; do
        for communicator in uniform reward similarity surrogate; do
            echo "$liars --averages --communicator $communicator --lie $lie $flags --exp-name fedavg-$communicator-$lie"
            echo "$liars --communicator $communicator --lie $lie $flags --exp-name pr-$communicator-$lie"
        done
    done
    # With the reward communicator agents report returns, about which a liar may boast
    for lie in random flipped opposite; do
        echo "$liars --averages --communicator reward --lie $lie --boast $flags --exp-name fedavg-reward-$lie+boast"
        echo "$liars --communicator reward --lie $lie --boast $flags --exp-name pr-reward-$lie+boast"
    done
    # With --gate value agents read critics, which may lie, too
    for lie in none random flipped opposite inflated maximal; do
        echo "$liars --communicator uniform --gate value --lie $lie $flags --exp-name pr-gate-$lie"
    done
done
