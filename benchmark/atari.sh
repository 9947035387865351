#!/usr/bin/env bash
# The paper's figures on Atari with the grids of its table 2: two games, five methods, ten seeds.
#
#   bash benchmark/atari.sh | python benchmark/run.py        3,300 runs of 10 M steps, 21,000 hours on two cores
#   bash benchmark/atari.sh quick | python benchmark/run.py  10 runs of 1 M steps on BeamRider, six and a half hours
#
# On a machine with a GPU several runs share it: give run.py more --jobs.
set -eu

games="BeamRiderNoFrameskip-v4 AsterixNoFrameskip-v4"
seeds="1 2 3 4 5 6 7 8 9 10"
steps=10000000
rates="5e-5 1e-4 2.5e-4 5e-4 1e-3"
coefs="0.5 1 2 5 10 20 50"  # of isolated agents and FedAvg
peer_coefs="0.5 1 2 5 10 20" # of PR-PPO
folder=runs/atari

case $* in
    "") ;;
    quick)
        games=BeamRiderNoFrameskip-v4
        seeds="1 2"
        steps=1000000
        rates=2.5e-4
        coefs=1
        peer_coefs=1
        folder=runs/atari-quick
        ;;
    *) echo "usage: bash $0 [quick]" >&2; exit 2 ;;
esac

prpo="OMP_NUM_THREADS=1 python prpo_atari.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_atari.py"
for seed in $seeds; do
    for game in $games; do
        for rate in $rates; do
            flags="--env-id $game --seed $seed --total-timesteps $steps --learning-rate $rate"
            flags="$flags --kl-direction forward --local-updates 16 --run-dir $folder"
            for coef in $coefs; do
                end="_lr${rate}_coef$coef"
                echo "$prpo --communicator identity $flags --kl-coef $coef --exp-name isolated$end"
                echo "$fedavg --communicator uniform $flags --kl-coef $coef --exp-name fedavg-uniform$end"
                echo "$fedavg --communicator reward $flags --kl-coef $coef --exp-name fedavg-reward$end"
            done
            for coef in $peer_coefs; do
                end="_lr${rate}_coef$coef"
                echo "$prpo --communicator uniform $flags --kl-coef $coef --exp-name pr-uniform$end"
                echo "$prpo --communicator reward $flags --kl-coef $coef --exp-name pr-reward$end"
            done
        done
    done
done
