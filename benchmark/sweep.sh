#!/usr/bin/env bash
# Prints the training commands of a sweep, one per line; see --help.
set -euo pipefail

usage() {
    cat <<END
usage: bash benchmark/sweep.sh minigrid|atari|llm [--quick | --results]
       bash benchmark/sweep.sh table1 [--quick | --skills]
       bash benchmark/sweep.sh doorkey|keycorridor|missions|levels|networks|crowd|skills [--tune | --results]
       bash benchmark/sweep.sh anchor|trpo [--results]

Prints training commands, one per line; runs nothing. benchmark/run.py executes them, here or as Slurm arrays, and goes
on where it was cut off. The lines assume the root of the repository as working directory; but for those of llm and
table1 they use one core each (on a GPU machine several share a GPU):

    bash benchmark/sweep.sh minigrid --quick | python benchmark/run.py
    python benchmark/plot.py --runs runs/minigrid-quick --out minigrid-quick

(default)  the paper's grid. minigrid, atari: table 2, three tasks or two games, ten seeds, five methods. llm: table 5,
           seven agents on TL;DR, one GPU each, with the reward model that benchmark/pipeline.sh trains
--quick    a night on two cores. minigrid: two tasks, three seeds, two learning rates, 1 M steps; atari: BeamRider, two
           seeds, 1 M steps; llm: three agents and the small model on documentation
--results  the runs behind benchmark/results/: 3, 3 and 1.5 hours on two cores

table1, the paper's table 1 at small scale (docs/pipeline.md): SmolLM2 on documentation, three agents, from the adapter
and with the reward model of \`benchmark/pipeline.sh all --quick\`.
(default)  PPO and GRPO, iid and by topic, five methods, three KL coefficients, three seeds: more than a day on two cores,
           estimated from those of llm
--quick    one KL coefficient, one seed: two and a quarter hours, from 13 minutes for a run on one core
--skills   the same on string skills, as skills below: a tiny model and three seeds, 40 minutes

When does sharing pay (docs/results.md): doorkey and keycorridor, agents with an easy, a middling and a hard task;
missions, with conflicting goals; levels, with few levels each; networks, of different sizes; crowd, 1 to 8 agents on one
hard task; skills, language models that differ in how often their prompts ask for a rare skill (first run
benchmark/skills.py).
anchor: what slows mixing down, peers or the age of the snapshots. trpo: PR-TRPO, isolated TRPO and
PR-PPO at equal steps on three tasks, and how far PR-TRPO's updates move, with and without the bound of --delta.
--tune     a small grid on a tuning seed, the same for every method; benchmark/choose.py chooses
--results  the chosen settings on five fresh seeds (also the default)

--exp-name tells the method and what is searched over. An estimate of the time goes to stderr.
END
}

family=${1:-} mode=${2:-}
case $family in
minigrid | atari | llm | table1 | doorkey | keycorridor | missions | levels | networks | crowd | skills | anchor | trpo) ;;
--help | -h)
    usage
    exit 0
    ;;
*)
    echo "sweep.sh: unknown family '$family'; try --help" >&2
    exit 2
    ;;
esac
case $family$mode in
table1--results) echo "sweep.sh: table1 has no $mode; try --help" >&2 && exit 2 ;;
minigrid | atari | llm | table1 | minigrid--quick | atari--quick | llm--quick | table1--quick | table1--skills | *--results) ;;
doorkey | keycorridor | missions | levels | networks | crowd | skills | anchor | trpo) mode=--results ;;
doorkey--tune | keycorridor--tune | missions--tune | levels--tune | networks--tune | crowd--tune | skills--tune) ;;
*)
    echo "sweep.sh: unknown option $mode; try --help" >&2
    exit 2
    ;;
esac
folder=runs/$family${mode/--/-}

SKILLS="--base-model runs/skills/model --dataset runs/skills/train.jsonl --reward benchmark/skills.py:exact"
SKILLS+=" --missing-eos-penalty 0 --precision float32 --temperature 1 --response-length 13 --lora-rank 8"
SKILLS+=" --prompts-per-agent 400 --eval-prompts 40"
THREE_DOORS="--env-ids MiniGrid-DoorKey-5x5-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DoorKey-8x8-v0"
# What is searched over. Seeds are outermost: a sweep that is cut off has whole seeds
SEEDS=(1 2 3 4 5 6 7 8 9 10)
RATES=(5e-5 1e-4 2.5e-4 5e-4 1e-3)
KL_COEFS=(0.5 1 2 5 10 20 50) # isolated agents and FedAvg
PEER_COEFS=(0.5 1 2 5 10 20)  # the paper's communication coefficient
COMMON=() SPEED=6000 # agent-steps per second on each of two cores, but for Atari
case $family$mode in
minigrid*)
    TASKS=(MiniGrid-FourRooms-v0 MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0)
    METHODS=(isolated fedavg-uniform fedavg-similarity pr-uniform pr-similarity)
    STEPS=5000000
    ;;&
atari*)
    TASKS=(BeamRiderNoFrameskip-v4 AsterixNoFrameskip-v4)
    METHODS=(isolated fedavg-uniform fedavg-reward pr-uniform pr-reward)
    STEPS=10000000
    ;;&
minigrid--quick)
    TASKS=(MiniGrid-DoorKey-6x6-v0 MiniGrid-DistShift2-v0) SEEDS=(1 2 3) STEPS=1000000
    RATES=(2.5e-4 1e-3) KL_COEFS=(0.5) PEER_COEFS=(0.5)
    ;;
minigrid--results)
    SEEDS=(1 2 3 4 5) STEPS=200000 # on FourRooms 1 M; elsewhere the first three seeds
    METHODS=(isolated isolated-no-penalty fedavg-uniform pr-uniform pr-similarity pr-reward pr-uniform-forward)
    RATES=(1e-3) KL_COEFS=(0.5) PEER_COEFS=(0.5) COMMON=(--local-updates 4)
    ;;
atari--quick)
    TASKS=(BeamRiderNoFrameskip-v4) SEEDS=(1 2) STEPS=1000000 RATES=(2.5e-4) KL_COEFS=(1) PEER_COEFS=(1)
    ;;
atari--results)
    TASKS=(BeamRiderNoFrameskip-v4) SEEDS=(1 2) STEPS=1001472 METHODS=(isolated pr-reward)
    RATES=(2.5e-4) KL_COEFS=(1) PEER_COEFS=(1) COMMON=(--eval-every 122)
    ;;
doorkey* | keycorridor*)
    METHODS=(isolated fedavg-uniform fedavg-reward pr-uniform pr-reward pr-similarity pr-surrogate)
    STEPS=250000
    ;;&
missions*)
    METHODS=(isolated fedavg-uniform pr-uniform pr-self0.6 pr-self0.2 pr-similarity pr-surrogate)
    STEPS=143360 SPEED=3000
    ;;&
levels*) METHODS=(isolated fedavg-uniform pr-uniform) STEPS=250000 SPEED=2000 ;;&
networks*) METHODS=(isolated fedavg-uniform pr-uniform pr-reward) STEPS=250000 ;;&
crowd*) METHODS=(isolated fedavg-uniform pr-uniform pr-reward) STEPS=150000 ;;&
doorkey* | keycorridor* | missions* | levels* | networks* | crowd*) SEEDS=(1 2 3 4 5) PEER_COEFS=(0.5) ;;&
anchor*) SEEDS=(1 2 3 4 5) STEPS=131072 ;;& # on BeamRider with the first three seeds
trpo*) SEEDS=(1 2 3 4 5) STEPS=122880 SPEED=2500 ;;&
skills*)
    SEEDS=(1 2 3 4 5) RATES=(1e-3) KL_COEFS=(0.03)
    METHODS=(isolated fedavg-naive fedavg-exact pr-reverse pr-forward)
    ;;&
skills--tune) SEEDS=(101 102) RATES=(3e-4 1e-3 3e-3 1e-2) KL_COEFS=(0.03 0.3) ;;
*--tune) SEEDS=(101) PEER_COEFS=(0.1 0.2 0.5 2) ;;
llm)
    LAUNCH="torchrun --nproc-per-node 7 prpo_llm.py --num-agents 7"
    PARTITIONS=(iid topic) METHODS=(isolated fedavg pr0.6 pr0.2) SEEDS=(1) KL_COEFS=(0.03 0.1 0.3) INTERVALS=(1 3 7)
    # Table 5: 64 prompts per step, 26 steps x 6 epochs, 32 prompts per optimizer step, two PPO epochs
    COMMON=(--base-model mistral-community/Mistral-7B-v0.2 --dataset trl-lib/tldr --reward runs/tldr/reward)
    COMMON+=(--batch-size 64 --minibatch-size 32 --micro-batch-size 8 --total-steps 156 --prompts-per-agent 1664)
    COMMON+=(--topics loseit dating_advice legaladvice offmychest personalfinance relationship_advice tifu)
    COMMON+=(--eval-dataset trl-lib/tldr:validation --eval-prompts 128 --max-prompt-tokens 512)
    COMMON+=(--missing-eos-penalty 3 --min-response-tokens 18)
    ;;
table1*)
    LAUNCH="python prpo_llm.py"
    PARTITIONS=(iid topic) METHODS=(isolated fedavg fedavg-naive pr0.6 pr0.2) SEEDS=(1 2 3) INTERVALS=(3)
    KL_COEFS=(0.03 0.1 0.3)
    COMMON=(--base-model runs/docstrings/base --adapter runs/docstrings/sft-adapter --reward runs/docstrings/reward)
    COMMON+=(--dataset runs/docstrings/prompts.jsonl --prompts-per-agent 64 --total-steps 12 --learning-rate 3e-4)
    COMMON+=(--max-prompt-tokens 128 --response-length 40 --eval-prompts 16)
    ;;&
table1--quick) SEEDS=(1) KL_COEFS=(0.1) ;;
table1--skills)
    LAUNCH="OMP_NUM_THREADS=1 $LAUNCH" INTERVALS=(1)
    read -ra COMMON <<<"$SKILLS"
    ;;
llm--*)
    LAUNCH="python prpo_llm.py"
    PARTITIONS=(topic) METHODS=(isolated fedavg pr0.6 pr0.2) SEEDS=(1 2) KL_COEFS=(0.1) INTERVALS=(3)
    COMMON=(--total-steps 40 --learning-rate 1e-3 --topics torch sympy transformers)
    ;;&
llm--results)
    METHODS=(isolated fedavg pr) SEEDS=(2 3)
    COMMON=(--total-steps 12 --learning-rate 1e-3 --max-prompt-tokens 128 --response-length 40)
    COMMON+=(--topics torch sympy transformers)
    ;;
esac

control() {
    for seed in "${SEEDS[@]}"; do
        for task in "${TASKS[@]}"; do
            for method in "${METHODS[@]}"; do
                script=prpo_$family.py communicator=${method#*-} coefs=("${KL_COEFS[@]}") direction=()
                runs=$folder steps=$STEPS
                case $family$mode$task in
                minigrid--results*FourRooms*)
                    [[ $method != *-no-penalty ]] || continue
                    steps=1000000 runs=runs/fourrooms-results
                    ;;
                minigrid--results*) ((seed <= 3)) || continue ;;
                esac
                [[ $family$mode == minigrid--results && $method != *-forward ]] && direction=(--kl-direction reverse)
                case $method in
                isolated) communicator=identity ;;
                isolated-no-penalty) communicator=identity coefs=(0) ;;
                fedavg-*) script=fedavg_ppo.py ;;
                pr-*) communicator=${communicator%-forward} coefs=("${PEER_COEFS[@]}") ;;
                esac
                for rate in "${RATES[@]}"; do
                    for coef in "${coefs[@]}"; do
                        name=$method
                        [[ $mode == --results ]] || name+=_lr${rate}_coef$coef
                        echo "OMP_NUM_THREADS=1 python $script --communicator $communicator --env-id $task --seed $seed" \
                            "--total-timesteps $steps --learning-rate $rate --kl-coef $coef" \
                            "${direction[@]}" "${COMMON[@]}" "--run-dir $runs --exp-name $name"
                    done
                done
            done
        done
    done
    [[ $family$mode == minigrid--results ]] || return 0
    for seed in 1 2 3 4 5 6 7 8; do # one agent without penalty and value clipping, against stable-baselines3
        alone="--env-id MiniGrid-DoorKey-6x6-v0 --seed $seed --total-timesteps $STEPS --learning-rate 1e-3 --no-clip-vloss --eval-episodes 20 --run-dir runs/sb3"
        echo "OMP_NUM_THREADS=1 python benchmark/baselines/sb3_ppo.py $alone --exp-name sb3"
        echo "OMP_NUM_THREADS=1 python prpo_minigrid.py --communicator identity --num-agents 1 --kl-coef 0 $alone --exp-name isolated"
    done
}

# What agents differ in: a line for each variant, name:flags
variants() {
    case $family in
    doorkey) echo ":$THREE_DOORS" ;;
    keycorridor) echo ":--env-ids MiniGrid-KeyCorridorS3R1-v0 MiniGrid-KeyCorridorS3R2-v0 MiniGrid-KeyCorridorS3R3-v0" ;;
    missions) echo ":--env-id MiniGrid-Fetch-5x5-N2-v0 --missions key ball key" ;;
    levels) printf -- "%s:--env-id MiniGrid-MultiRoom-N2-S4-v0 --levels-per-agent %s\n" 4 4 16 16 64 64 ;;
    networks)
        echo "equal:--env-id MiniGrid-DoorKey-6x6-v0 --hidden-sizes 64 64 64"
        echo "unequal:--env-id MiniGrid-DoorKey-6x6-v0 --hidden-sizes 128 32 32"
        ;;
    crowd) printf -- "%s:--env-id MiniGrid-DoorKey-6x6-v0 --num-agents %s\n" 8 8 4 4 2 2 ;;
    esac
}

sharing() {
    for seed in "${SEEDS[@]}"; do
        while IFS=: read -r variant task; do
            for method in "${METHODS[@]}"; do
                script=prpo_minigrid.py communicator=${method#*-} more=()
                case $method in
                isolated) communicator=identity ;;
                fedavg-*) script=fedavg_ppo.py ;;
                pr-self*) communicator=self-preferred more=(--self-preference "${method#pr-self}") ;;
                esac
                [[ $script$variant == fedavg_ppo.pyunequal ]] && continue # there is no average of these
                case $family$mode-$method-$variant in # eight agents alone are also two or four; eight are tuned for all
                crowd*-isolated-[24] | crowd--tune-*-[24]) continue ;;
                esac
                for coef in "${PEER_COEFS[@]}"; do
                    name=$method${variant:+-$variant}
                    [[ $mode == --tune ]] && name+=_coef$coef
                    echo "OMP_NUM_THREADS=1 python $script --communicator $communicator" "${more[@]}" "$task --seed $seed" \
                        "--total-timesteps $STEPS --learning-rate 1e-3 --kl-coef $coef --kl-direction reverse" \
                        "--local-updates 4 --eval-episodes 50 --run-dir $folder --exp-name $name"
                done
            done
        done < <(variants)
    done
}

anchor() { # agents of the doorkey family, and on BeamRider
    local keys="$THREE_DOORS --total-timesteps 250000"
    keys+=" --learning-rate 1e-3 --kl-direction reverse --eval-episodes 50 --run-dir $folder/doorkey"
    local beam="prpo_atari.py --env-id BeamRiderNoFrameskip-v4 --total-timesteps $STEPS --save-every 16 --eval-episodes 0"
    beam+=" --run-dir $folder/beamrider"
    for seed in "${SEEDS[@]}"; do
        while IFS=: read -r name method; do
            [[ $method == *beam* && $seed -gt 3 ]] && continue
            method=${method/keys/"$keys"} method=${method/beam/"$beam"}
            echo "OMP_NUM_THREADS=1 python $method --seed $seed --exp-name $name"
        done <<END
isolated:prpo_minigrid.py keys --kl-coef 0.5 --communicator identity --local-updates 4
isolated-snapshot:prpo_minigrid.py keys --kl-coef 0.3333 --communicator identity --self-reference snapshot --local-updates 4
pr-uniform:prpo_minigrid.py keys --kl-coef 0.5 --communicator uniform --local-updates 4
pr-uniform-every1:prpo_minigrid.py keys --kl-coef 0.5 --communicator uniform --local-updates 1
fedavg-uniform:fedavg_ppo.py keys --kl-coef 0.5 --communicator uniform --local-updates 4
fedavg-uniform-every1:fedavg_ppo.py keys --kl-coef 0.5 --communicator uniform --local-updates 1
isolated:beam --communicator identity
isolated-snapshot:beam --communicator identity --self-reference snapshot --kl-coef 0.6667
pr-uniform:beam --communicator uniform
pr-uniform-every1:beam --communicator uniform --local-updates 1
END
    done
}

trpo() {
    local steps ppo="prpo_minigrid.py --learning-rate 1e-3 --kl-coef 0.5 --kl-direction reverse" # as chosen for doorkey
    while IFS=: read -r variant task methods; do
        for seed in "${SEEDS[@]}"; do
            for name in $methods; do
                steps=$STEPS
                case $name in
                isolated-trpo) method="prtrpo_minigrid.py --communicator identity --local-updates 4" ;;
                pr-trpo) method="prtrpo_minigrid.py --local-updates 4" ;;
                pr-trpo-every1) method=prtrpo_minigrid.py ;; # as Observation 1 has it
                pr-uniform) method="$ppo --local-updates 4" ;;
                fixed) method=prtrpo_minigrid.py steps=61440 ;;
                bounded) method="prtrpo_minigrid.py --delta 0.2" steps=61440 ;;
                tight) method="prtrpo_minigrid.py --delta 0.1" steps=61440 ;;
                esac
                echo "OMP_NUM_THREADS=1 python $method $task --seed $seed --total-timesteps $steps --eval-episodes 50" \
                    "--run-dir $folder/$variant --exp-name $name"
            done
        done
    done <<END
doorkey6x6:--env-id MiniGrid-DoorKey-6x6-v0:isolated-trpo pr-trpo pr-trpo-every1 pr-uniform
bound:--env-id MiniGrid-DoorKey-5x5-v0:fixed bounded tight
fourrooms:--env-id MiniGrid-FourRooms-v0:isolated-trpo pr-trpo pr-trpo-every1 pr-uniform
doorkey:$THREE_DOORS:isolated-trpo pr-trpo pr-trpo-every1 pr-uniform
END
}

llm() {
    for seed in "${SEEDS[@]}"; do
        for algorithm in grpo ppo; do
            for partition in "${PARTITIONS[@]}"; do
                for method in "${METHODS[@]}"; do
                    case $method in
                    isolated) aggregation="--aggregation none" ;;
                    fedavg) aggregation="--aggregation weights --communicator uniform" ;;
                    fedavg-naive) aggregation="--aggregation weights --lora-average naive --communicator uniform" ;;
                    pr) aggregation="--aggregation policy --communicator uniform" ;;
                    pr*) aggregation="--aggregation policy --communicator self-preferred --self-preference ${method#pr}" ;;
                    esac
                    for coef in "${KL_COEFS[@]}"; do
                        for interval in "${INTERVALS[@]}"; do
                            name=${algorithm}_${partition}_${method}_kl${coef}_every$interval size=()
                            case $family$mode-$algorithm in # in prompts; of equal completions with skills
                            table1--skills-grpo) prompts=8 ;;
                            table1--skills-ppo) prompts=64 ;;
                            table1*-grpo | llm--results-grpo) prompts=2 ;;
                            table1*-ppo | llm--results-ppo) prompts=6 ;;
                            *) prompts= ;;
                            esac
                            [[ -z $prompts ]] || size=(--batch-size "$prompts" --micro-batch-size "$prompts")
                            if [[ $mode == --skills ]]; then # as chosen for skills
                                size+=(--learning-rate "$([[ $method == fedavg* ]] && echo 3e-3 || echo 1e-3)")
                            fi
                            [[ $mode == --results ]] && name=$method-$algorithm
                            echo "$LAUNCH --algorithm $algorithm --partition $partition $aggregation --kl-coef $coef" \
                                "--local-updates $interval --seed $seed" "${size[@]}" "${COMMON[@]}" \
                                "--run-dir $folder --exp-name $name"
                        done
                    done
                done
            done
        done
    done
}

skills() { # tiny agents differ in how often their prompts ask for the rare skill
    local task="$SKILLS --partition topic --batch-size 8 --micro-batch-size 8 --local-updates 1"
    for seed in "${SEEDS[@]}"; do
        for method in "${METHODS[@]}"; do
            case $method in
            isolated) aggregation="--aggregation none" ;;
            fedavg-*) aggregation="--aggregation weights --lora-average ${method#fedavg-}" ;;
            pr-*) aggregation="--aggregation policy --kl-direction ${method#pr-}" ;;
            esac
            rates=("${RATES[@]}") coefs=("${KL_COEFS[@]}")
            [[ $method$mode == fedavg-*--results ]] && rates=(3e-3) # as choose.py has chosen
            for rate in "${rates[@]}"; do
                for coef in "${coefs[@]}"; do
                    name=$method
                    [[ $mode == --tune ]] && name+=_lr${rate}_coef$coef
                    echo "OMP_NUM_THREADS=1 python prpo_llm.py $aggregation $task --learning-rate $rate --kl-coef $coef" \
                        "--seed $seed --run-dir $folder --exp-name $name"
                done
            done
        done
    done
}

estimate() { # of three agents where a line does not tell
    tee >(awk -v speed="$SPEED" \
        '{ agents = match($0, /--num-agents [0-9]+/) ? substr($0, RSTART + 13, RLENGTH - 13) : 3
           match($0, /--total-timesteps [0-9]+/)
           hours += agents * substr($0, RSTART + 18, RLENGTH - 18) / (/NoFrameskip/ ? 650 : speed) / 3600 }
        END { printf "%d runs, about %.1f h on two cores\n", NR, hours / 2 }' >&2)
}

case $family in
minigrid | atari) control | estimate ;;
doorkey | keycorridor | missions | levels | networks | crowd) sharing | estimate ;;
anchor | trpo) "$family" | estimate ;;
skills) skills | tee >(wc -l | sed 's/$/ runs/' >&2) ;;
llm | table1) llm | tee >(wc -l | sed 's/$/ runs/' >&2) ;;
esac
