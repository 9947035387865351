#!/usr/bin/env bash
# FourRooms at the paper's length (docs/results/one_task.md): 5 M steps, five seeds.
#
#   bash benchmark/fourrooms_5m.sh | python benchmark/run.py           35 runs, nine hours on two cores
#   bash benchmark/fourrooms_5m.sh searched | python benchmark/run.py  20 runs, five hours
#   bash benchmark/fourrooms_5m.sh search | python benchmark/run.py    54 runs of 500,000 steps, two hours
#   bash benchmark/fourrooms_5m.sh paper | python benchmark/run.py     30 runs, ten hours
#
# searched: the settings that the search of `minigrid.sh tune` prefers where they are others
# (`python benchmark/table.py --search --measure auc --runs runs/minigrid-tune`), and FedAvg with the learning rate
# that it prefers for the other methods.
#
# paper: a round every 32 iterations and the forward KL, as the paper has them; search: three learning
# rates and three coefficients of its grids for the same methods, on a tuning seed. `paper` has the
# setting of each method with the largest training return over the run, for all 1e-3 and 0.5.
set -eu
mode=$*
seeds="1 2 3 4 5"
rates=1e-3
coefs=0.5
steps=5000000
updates=4
folder=runs/fourrooms-5m
case $mode in
    "" | searched) ;;
    paper) updates=32 folder=runs/fourrooms-paper ;;
    search)
        seeds=101
        rates="2.5e-4 5e-4 1e-3"
        coefs="0.5 2 10"
        steps=500000
        updates=32
        folder=runs/fourrooms-search
        ;;
    *) echo "usage: bash $0 [searched | search | paper]" >&2; exit 2 ;;
esac

prpo="OMP_NUM_THREADS=1 python prpo_minigrid.py"
fedavg="OMP_NUM_THREADS=1 python fedavg_ppo.py"
for seed in $seeds; do
    flags="--env-id MiniGrid-FourRooms-v0 --seed $seed --total-timesteps $steps --local-updates $updates"
    flags="$flags --run-dir $folder"
    reverse="$flags --kl-direction reverse"
    forward="$flags --kl-direction forward"
    if [ "$mode" = searched ]; then
        rate="--learning-rate 5e-4 --kl-coef 0.5"
        coef="--learning-rate 1e-3 --kl-coef 2"
        echo "$prpo --communicator identity $reverse $rate --exp-name isolated-searched"
        echo "$fedavg --communicator uniform $reverse $coef --exp-name fedavg-uniform-searched"
        echo "$fedavg --communicator uniform $reverse $rate --exp-name fedavg-uniform-lr5e-4"
        echo "$prpo --communicator uniform $reverse $rate --exp-name pr-uniform-searched"
    elif [ $updates = 32 ]; then
        for rate in $rates; do
            for coef in $coefs; do
                setting="--learning-rate $rate --kl-coef $coef"
                end=""
                if [ "$mode" = search ]; then end=_lr${rate}_coef$coef; fi
                echo "$prpo --communicator identity $forward $setting --exp-name isolated$end"
                echo "$fedavg --communicator uniform $forward $setting --exp-name fedavg-uniform$end"
                echo "$prpo --communicator uniform $forward $setting --exp-name pr-uniform-forward$end"
                echo "$prpo --communicator similarity $forward $setting --exp-name pr-similarity-forward$end"
                echo "$prpo --communicator uniform --gate value $forward $setting --exp-name pr-gate-forward$end"
                echo "$prpo --communicator similarity --gate value $forward $setting --exp-name pr-similarity-gate-forward$end"
            done
        done
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
