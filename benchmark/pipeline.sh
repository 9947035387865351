#!/usr/bin/env bash
# Prints the commands of supervised fine-tuning and reward modelling, one per line; see --help.
set -euo pipefail

usage() {
    cat <<END
usage: bash benchmark/pipeline.sh data|sft|reward|judge|all [--quick]

Prints the commands, one per line and in their order, around TRL's command line; runs nothing. The lines assume the root
of the repository as working directory. benchmark/run.py executes them and goes on where it was cut off:

    bash benchmark/pipeline.sh all --quick | python benchmark/run.py --jobs 1 --cores 2

data    what the others read
sft     supervised fine-tuning of an adapter, and the adapter merged into its base
reward  a reward model on top of that, merged, and its accuracy on held-out pairs; without --quick also as an
        adapter of the base model, for prpo_llm.py --value-init
judge   --quick: a second one, on pairs that the first has not seen, for benchmark/judge.py --reward-model

(default)  the paper's tables 3 and 4 on trl-lib/tldr and trl-lib/tldr-preference, into runs/tldr: one GPU of 80 GB.
           The first 16,722 posts are for sft alone (benchmark/tldr_sft.yaml); benchmark/llm.sh takes the others
--quick    SmolLM2 on documentation, into runs/docstrings, no hub: half an hour on two cores that do nothing else. The
           adapter has the shape of prpo_llm.py's, which starts from it with --adapter runs/docstrings/sft-adapter
END
}

step=${1:-} mode=${2:-}
case $step$mode in
data | sft | reward | judge | all | data--quick | sft--quick | reward--quick | judge--quick | all--quick) ;;
--help* | -h*)
    usage
    exit 0
    ;;
*)
    echo "pipeline.sh: unknown step '$step' or option '$mode'; try --help" >&2
    exit 2
    ;;
esac

# Tables 3 and 4: rank, alpha, dropout, layers; batch x accumulation; AdamW and its rate; lengths
folder=runs/tldr base=mistral-community/Mistral-7B-v0.2
sft_data="--config benchmark/tldr_sft.yaml" pairs=trl-lib/tldr-preference test_pairs=trl-lib/tldr-preference
lora="--lora_r 16 --lora_alpha 32 --lora_dropout 0 --lora_target_modules q_proj k_proj v_proj o_proj"
sft_lora=$lora
common="--use_peft --dtype bfloat16 --report_to none --save_strategy no --seed 1 --optim adamw_torch"
sft_steps="--num_train_epochs 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --learning_rate 1e-5"
sft_steps+=" --max_length 1024"
reward_steps="--num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8"
reward_steps+=" --learning_rate 1e-5 --max_length 1024 --gradient_checkpointing False"
if [[ $mode == --quick ]]; then
    folder=runs/docstrings base=$folder/base
    sft_data="--dataset_name $folder/sft" pairs=$folder/reward-pairs test_pairs=$folder/reward-pairs/test.jsonl
    sft_lora="--lora_r 64 --lora_alpha 16 --lora_dropout 0"
    sft_lora+=" --lora_target_modules q_proj k_proj v_proj gate_proj up_proj down_proj"
    common+=" --use_cpu --gradient_checkpointing False --lr_scheduler_type cosine --warmup_steps 5"
    sft_steps="--max_steps 60 --per_device_train_batch_size 8 --learning_rate 1e-3"
    reward_steps="--max_steps 75 --per_device_train_batch_size 8 --learning_rate 1e-3"
fi
text_pairs="--lora_task_type SEQ_CLS --lora_modules_to_save score"

data() {
    if [[ $mode == --quick ]]; then
        echo "python benchmark/pipeline.py data --out $folder"
    fi
}

sft() {
    echo "trl sft --model_name_or_path $base $sft_data $sft_lora $common $sft_steps" \
        "--output_dir $folder/sft-adapter"
    echo "python benchmark/pipeline.py merge --model $folder/sft-adapter --out $folder/sft"
}

# A reward model: name, data
model() {
    echo "trl reward --model_name_or_path $folder/sft --dataset_name $2 $lora $text_pairs $common $reward_steps" \
        "--output_dir $folder/$1-adapter"
    echo "python benchmark/pipeline.py merge --model $folder/$1-adapter --out $folder/$1"
    echo "python benchmark/pipeline.py accuracy --model $folder/$1 --pairs $test_pairs --limit 2000" \
        "--out $folder/reward_accuracy.csv"
}

reward() {
    model reward "$pairs"
    if [[ $mode != --quick ]]; then
        echo "python benchmark/pipeline.py join --adapter $folder/sft-adapter --model $folder/reward-adapter" \
            "--out $folder/value-adapter"
    fi
}

judge() {
    if [[ $mode == --quick ]]; then
        model judge $folder/judge-pairs
    fi
}

if [[ $step == all ]]; then
    data
    sft
    reward
    judge
else
    $step
fi
