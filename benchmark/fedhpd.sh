#!/usr/bin/env bash
# Distributions on public states (docs/results/distributions.md): ten agents with ten networks on CartPole;
# isolated, FedHPD, PR-PPO with uniform weights.
#
#   bash benchmark/fedhpd.sh | python benchmark/run.py       15 runs, 18 minutes on two busy cores
#   bash benchmark/fedhpd.sh tune | python benchmark/run.py  12 runs, 23 minutes on two busy cores
#
# tune: four settings of each method on a tuning seed. For FedHPD the steps of distillation and the
# iterations between rounds; its agents have the isolated ones' coefficient. The settings below are the
# best there (`python benchmark/table.py --search --measure auc --runs runs/fedhpd-tune`).
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" episodes=20 folder=runs/fedhpd-results ;;
    tune) seeds=101 episodes=0 folder=runs/fedhpd-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

fedhpd="OMP_NUM_THREADS=1 python benchmark/fedhpd.py"
coefs=0 pulls=0.5 steps=10 intervals=8 # the chosen settings
base=$coefs
if [ "$mode" = tune ]; then
    coefs="0 0.1 0.5 1" pulls="0.1 0.5 1 2" steps="2 10" intervals="2 8"
fi
for seed in $seeds; do
    flags="--seed $seed --eval-episodes $episodes --run-dir $folder"
    for coef in $coefs; do
        end=""
        if [ "$mode" = tune ]; then end=_coef$coef; fi
        echo "$fedhpd --communicator identity --kl-coef $coef $flags --exp-name isolated$end"
    done
    for coef in $pulls; do
        end=""
        if [ "$mode" = tune ]; then end=_coef$coef; fi
        echo "$fedhpd --communicator uniform --kl-coef $coef $flags --exp-name pr-uniform$end"
    done
    for step in $steps; do
        for interval in $intervals; do
            end=""
            if [ "$mode" = tune ]; then end=_steps${step}_interval$interval; fi
            settings="--distill --distill-steps $step --local-updates $interval --kl-coef $base"
            echo "$fedhpd $settings $flags --exp-name fedhpd$end"
        done
    done
done
