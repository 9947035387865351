#!/usr/bin/env bash
# Averages of language models whose rewards have other units (docs/results/units.md): the agents of
# skills.sh, with rewards times 1, 1, 1 (equal), 1, 10, 100 (rising with the share of the rare skill) or
# 100, 10, 1 (falling). FedAvg weighs the agents equally, by their mean rewards, or by their relative gains,
# as FGRPO does. First run `python benchmark/skills.py`.
#
#   bash benchmark/fgrpo.sh | python benchmark/run.py       30 runs, six minutes on two cores
#   bash benchmark/fgrpo.sh tune | python benchmark/run.py  30 runs
#
# tune: three learning rates and two coefficients, of relative gains also two temperatures, on a tuning seed
# with rising units. The table below has the settings with the largest share of exact completions in training
# there, the column `training` of `python benchmark/skills.py --runs runs/fgrpo-tune`, which has no units.
# Units change the weights of `reward` only: the advantages of GRPO have none, nor have relative gains.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" folder=runs/fgrpo-results ;;
    tune) seeds=101 folder=runs/fgrpo-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

skills="--base-model runs/skills/model --dataset runs/skills/train.jsonl --reward benchmark/skills.py:exact"
skills="$skills --missing-eos-penalty 0 --precision float32 --temperature 1 --response-length 13"
skills="$skills --lora-rank 8 --prompts-per-agent 400 --eval-prompts 40 --partition topic --batch-size 8"
skills="$skills --micro-batch-size 8 --local-updates 1 --run-dir $folder"
for seed in $seeds; do
    while read -r name units rate coef temperature method; do
        run="OMP_NUM_THREADS=1 python prpo_llm.py $method $skills"
        if [ "$mode" = "" ]; then
            flags="--reward-weights benchmark/fgrpo/$units.csv --learning-rate $rate --kl-coef $coef"
            flags="$flags --communicator-temperature $temperature --seed $seed"
            echo "$run $flags --exp-name ${name}_$units"
            continue
        fi
        if [ "$units" != rising ]; then continue; fi
        temperatures=1
        if [ "$name" = fedavg-relative-gain ]; then temperatures="0.2 1"; fi
        for rate in 1e-3 3e-3 1e-2; do
            for coef in 0.03 0.3; do
                for temperature in $temperatures; do
                    flags="--reward-weights benchmark/fgrpo/$units.csv --learning-rate $rate --kl-coef $coef"
                    flags="$flags --communicator-temperature $temperature --seed $seed"
                    echo "$run $flags --exp-name ${name}_lr${rate}_coef${coef}_t$temperature"
                done
            done
        done
    done << TABLE
isolated              rising   1e-3  0.03  1  --aggregation none
fedavg-uniform        rising   3e-3  0.03  1  --aggregation weights --communicator uniform
fedavg-relative-gain  rising   3e-3  0.03  1  --aggregation weights --communicator relative-gain
fedavg-reward         equal    3e-3  0.03  1  --aggregation weights --communicator reward
fedavg-reward         rising   3e-3  0.03  1  --aggregation weights --communicator reward
fedavg-reward         falling  3e-3  0.03  1  --aggregation weights --communicator reward
TABLE
done
