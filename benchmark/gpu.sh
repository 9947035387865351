#!/usr/bin/env bash
# What a machine with a GPU is for, in nine minutes at most and without a network: the tests that need one, the
# tables of docs/speed.md's section "On a GPU", and where a decode step of a language model spends its time.
#
#   bash benchmark/gpu.sh [FOLDER [PART ...]]        the parts tests, llm, decode, atari, 1.5B and 8B, in this order
#   bash benchmark/gpu.sh quick [FOLDER [PART ...]]  tiny sizes, for a processor: some minutes
#
# A part that fails or takes too long does not stop the next. FOLDER, or runs/gpu, gets gpu.csv (speed and memory),
# decode.csv, kernels.csv, parts.csv (exit codes and seconds), machine.txt, and what was printed, in logs/.
set -u
cd "$(dirname "$0")/.." || exit 1
quick=""
if [ "${1:-}" = quick ]; then quick=1; shift; fi
out=${1:-runs/gpu}
shift
parts=${*:-tests llm decode atari 1.5B 8B}
python=${PYTHON:-python}
models=${MODELS:-runs/gpu-models} # some 20 GB
total=540 # seconds
if [ $quick ]; then total=3600; fi # processors may be busy
export HF_HUB_OFFLINE=1
mkdir -p "$out/logs"
{
    git rev-parse HEAD
    nvidia-smi -L
    nproc
    $python -c "
import importlib.metadata, sys
print('python', sys.version.split()[0])
for name in ('torch', 'transformers', 'peft', 'trl', 'stable-baselines3', 'ale-py'):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, 'is not installed')"
} > "$out/machine.txt" 2>&1

# run SECONDS NAME COMMAND ...: at most so long, and not beyond the total
run() {
    local left=$((total - SECONDS)) limit=$1 name=$2 began=$SECONDS code
    shift 2
    if [ $quick ]; then limit=$left; fi
    if [ "$limit" -gt $left ]; then limit=$left; fi
    if [ "$limit" -lt 5 ]; then
        echo "$name: no time left"
        return 1
    fi
    timeout -k 5 "$limit" "$@" > "$out/logs/$name.log" 2>&1
    code=$?
    echo "$name,$code,$((SECONDS - began))" >> "$out/parts.csv"
    echo "[$SECONDS s] $name: exit code $code, $(tail -n 1 "$out/logs/$name.log")"
    return $code
}

has() { $python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

# write_model SIZE: random weights, unless they are there
write_model() {
    if [ -d "$models/$1" ]; then return; fi
    run 150 "write-$1" $python benchmark/llm_memory.py --sizes "$1" --prompt-tokens $prompt --write "$models/$1.new" &&
        mv "$models/$1.new" "$models/$1"
}

# measure SECONDS WORK CONTENDER COMMAND ...: a row of gpu.csv
measure() {
    local limit=$1 work=$2 contender=$3 left=$((total - SECONDS - 10)) name
    shift 3
    if [ $quick ] || [ "$limit" -gt $left ]; then limit=$left; fi
    name=$(echo "$work $contender" | tr -cs '[:alnum:].\n' -)
    run $((limit + 10)) "$name" $python benchmark/gpu.py --csv "$out/gpu.csv" --seconds "$limit" \
        --work "$work" --contender "$contender" --command "$*"
}

if [ $quick ]; then
    small=tiny middle=tiny large=tiny prompt=20 response=8 steps=1 agents=3 batch=2 baseline=256 timesteps=256 workers=0
    decode="--lengths 4 8 --repeats 1" rollout="--num-steps 32"
else
    small=135M middle=1.5B large=8B prompt=300 response=58 steps=3 agents=7 batch=8 baseline=8192 timesteps=32768 workers=8
    decode="" rollout=""
fi
size="--response-length $response --group-size 8"
llm() { echo "prpo_llm.py --base-model $models/$1 --dataset $models/$1/prompts.jsonl --eval-prompts 0 $size"; }
dense="--communicator uniform --local-updates 1"

run_tests() {
    if [ ! $quick ]; then write_model $large & fi # beside the tests, which measure no time
    run 150 tests $python -m pytest -n $workers -v tests/test_gpu.py
    wait
}

run_llm() {
    write_model $small
    if has trl; then
        measure 60 llm "TRL's GRPOTrainer, $small" benchmark/baselines/trl_grpo.py --task "$models/$small" \
            --micro-batch-size 8 $size --total-steps $steps
    else
        echo "TRL's GRPOTrainer: skipped, trl is not installed"
    fi
    measure 60 llm "1 agent, $small" $(llm $small) --total-steps $steps --num-agents 1
    measure 60 llm "3 agents dense, $small" $(llm $small) --total-steps $steps --num-agents 3 $dense
}

run_decode() {
    local model
    for model in $small $middle; do
        write_model "$model"
        run 60 "decode-$model" $python benchmark/decode.py --model "$models/$model" \
            $decode --csv "$out/decode.csv" --kernels "$out/kernels.csv"
    done
    run 60 "decode-$small-3-agents" $python benchmark/decode.py --model "$models/$small" --agents 3 \
        $decode --csv "$out/decode.csv" --kernels "$out/kernels.csv"
}

run_atari() {
    local game="--env-id BeamRiderNoFrameskip-v4 --eval-episodes 0 $rollout" device=cuda
    local reward="--communicator reward --local-updates 2"
    if [ $quick ]; then device=cpu; fi
    if has stable_baselines3; then
        measure 60 atari stable-baselines3 benchmark/baselines/sb3_ppo.py $game --total-timesteps $baseline --device $device
    else
        echo "stable-baselines3: skipped, it is not installed"
    fi
    local ours="prpo_atari.py $game --total-timesteps $timesteps"
    measure 60 atari "1 agent, float32" $ours --num-agents 1 --communicator identity --precision float32
    measure 60 atari "3 agents reward, float32" $ours --num-agents 3 $reward --precision float32
    measure 60 atari "3 agents reward, bfloat16" $ours --num-agents 3 $reward --precision bfloat16
}

run_size() { # SIZE FLAG ...
    local model=$1
    shift
    write_model "$model"
    measure 150 sizes "$agents agents, $model${*:+, $*}" $(llm "$model") --total-steps 2 --num-agents $agents $dense \
        --batch-size $batch --minibatch-size $batch --micro-batch-size 1 --prompts-per-agent $batch "$@"
}

for part in $parts; do
    case $part in
        tests | llm | decode | atari) "run_$part" ;;
        1.5B) run_size $middle ;;
        8B) run_size $large --gradient-checkpointing ;;
        *) echo "$part: there is no such part" ;;
    esac
done
cat "$out"/*.csv
