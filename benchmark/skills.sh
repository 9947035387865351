#!/usr/bin/env bash
# Language models with a rare skill (docs/results/language_models.md): three tiny agents of which 5, 20 and 80 %
# of the prompts are for it. First run `python benchmark/skills.py`.
#
#   bash benchmark/skills.sh | python benchmark/run.py       25 runs, five minutes on two cores
#   bash benchmark/skills.sh tune | python benchmark/run.py  80 runs, a quarter of an hour
#
# tune: four learning rates and two coefficients on two tuning seeds. The table below has the rates that
# are best there, with coefficient 0.03, as
# `python benchmark/table.py --search --measure auc --runs runs/skills-tune` tells.
set -eu
mode=$*
case $mode in
    "") seeds="1 2 3 4 5" coefs=0.03 folder=runs/skills-results ;;
    tune) seeds="101 102" coefs="0.03 0.3" folder=runs/skills-tune ;;
    *) echo "usage: bash $0 [tune]" >&2; exit 2 ;;
esac

skills="--base-model runs/skills/model --dataset runs/skills/train.jsonl --reward benchmark/skills.py:exact"
skills="$skills --missing-eos-penalty 0 --precision float32 --temperature 1 --response-length 13"
skills="$skills --lora-rank 8 --prompts-per-agent 400 --eval-prompts 40 --partition topic --batch-size 8"
skills="$skills --micro-batch-size 8 --local-updates 1 --run-dir $folder"
for seed in $seeds; do
    while read -r name rates method; do
        if [ "$mode" = tune ]; then rates="3e-4 1e-3 3e-3 1e-2"; fi
        for rate in $rates; do
            for coef in $coefs; do
                end=""
                if [ "$mode" = tune ]; then end=_lr${rate}_coef$coef; fi
                run="OMP_NUM_THREADS=1 python prpo_llm.py $method $skills"
                echo "$run --learning-rate $rate --kl-coef $coef --seed $seed --exp-name $name$end"
            done
        done
    done << TABLE
isolated      1e-3  --aggregation none
fedavg-naive  3e-3  --aggregation weights --lora-average naive
fedavg-exact  3e-3  --aggregation weights --lora-average exact
pr-reverse    1e-3  --aggregation policy --kl-direction reverse
pr-forward    1e-3  --aggregation policy --kl-direction forward
TABLE
done
