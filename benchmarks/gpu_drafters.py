"""What drafters bring: trains draft heads for a model on text that it wrote itself, and measures them.

    python benchmarks/gpu_drafters.py MODEL --out DIR [--stages write train measure steps] [--methods ngram eagle3 ...]

MODEL is a folder or a GGUF file with a chat template. Stages, each with what the one before left in DIR:

- write: the model answers chat prompts (topics times forms of questions, below) -> DIR/text.jsonl
- train: `jackfield train-drafter` for each method that can be trained -> DIR/METHOD
- measure: greedy answers to prompts that were held out, without and with each drafter: one request at a time, one at a
  time on prompts that ask for a copy of a text, and many at once, which go on to their full length
- steps: what a step takes in the middle of as many answers at once, host and device together: engines in one process
  take turns of few steps

Every training and every engine that is measured runs in a process of its own. Those live side by side, each with a
cache of its own, and take turns: what disturbs the machine for a while disturbs all of them, and what is told in the
end are medians of ratios within one turn. Prints one JSON object for each figure. All sizes are flags: with small ones
it runs on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

TOPICS = (
    *("gravity", "photosynthesis", "the French Revolution", "prime numbers", "bread baking", "the human heart"),
    *("volcanoes", "inflation", "chess openings", "black holes", "vaccines", "the Silk Road", "recursion", "sleep"),
    *("electric motors", "the water cycle", "jazz", "probability", "bees", "the Roman Empire", "hash tables", "glass"),
    *("climate zones", "the printing press", "DNA", "coffee", "supply and demand", "tides", "compilers", "dolphins"),
    *("bicycles", "the stock market", "antibiotics", "haiku", "earthquakes", "batteries", "democracy", "spiders"),
    *("origami", "the Moon landing", "databases", "yoga", "magnetism", "cheese", "sorting algorithms", "migration"),
    *("rainbows", "the Industrial Revolution", "encryption", "gardening", "steam engines", "memory", "wind turbines"),
    *("poetry", "the periodic table", "dinosaurs", "regular expressions", "running", "the Renaissance", "soap"),
    *("satellites", "calculus", "penguins", "budgeting", "lighthouses", "the immune system", "version control"),
)
FORMS = (
    "What is {}?",
    "Explain {} to a ten-year-old.",
    "Write a short story about {}.",
    "Give me five facts about {}.",
    "Why does {} matter?",
    "What are common mistakes when people talk about {}?",
    "Summarize the history of {} in one paragraph.",
    "How would you teach {} in twenty minutes?",
    "Write a dialogue between two friends about {}.",
    "List pros and cons related to {}.",
    "Compare {} with something from everyday life.",
    "What questions should I ask an expert on {}?",
    "Write an email that invites colleagues to a talk on {}.",
    "Describe {} in three sentences.",
    "Give a step-by-step introduction to {}.",
    "What would the world be like without {}?",
    "Write a quiz with four questions about {}, with answers.",
    "Which terms must a beginner know about {}?",
    "Write a small Python program that has to do with {}.",
    "What is surprising about {}?",
    "Write a poem about {}.",
    "How has {} changed over time?",
    "Make a table of important dates or numbers for {}.",
    "Explain {} with an analogy, then without one.",
    "What do people disagree on when it comes to {}?",
    "Plan a weekend around {}.",
    "Write a product description inspired by {}.",
    "Answer as a teacher: how does {} work?",
    "Name three books or films about {} and say why.",
    "Translate the idea of {} into one slogan, and explain it.",
    "What are the risks of {}?",
    "Outline an essay on {}.",
    "Which skills does {} need?",
    "What would a skeptic say about {}?",
    "Describe a day in the life of someone who works with {}.",
    "Give me a recipe-like set of instructions for {}.",
    "What is the future of {}?",
    "Explain the science behind {}.",
    "Tell a joke about {}, then explain it.",
    "What should a museum show about {}?",
)
COPY = "Repeat the following text word for word, with nothing before or after it.\n\n{}"
TRAINED = ("eagle3", "medusa")
PLAIN = "plain"
WORKS = ("single", "copy", "concurrent")
PARTS = ("write", "train", "measure", "steps")
TURN, BETWEEN = 20, 3
"""Steps that are timed together, and steps before them that are not."""


def main() -> None:
    args = parser().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part:
        run_part(args)
        return
    parts = ["write"] if "write" in args.stages else []
    if "train" in args.stages:
        parts += [f"train {method}" for method in args.methods if method in TRAINED]
    again = [sys.executable, *sys.argv]
    failed = [part for part in parts if subprocess.run([*again, "--part", part], check=False).returncode]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    if "measure" in args.stages:
        compare(args)
    if "steps" in args.stages:
        steps(args)


def parser() -> argparse.ArgumentParser:
    """Return the flags."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("model")
    add("--out", type=Path, required=True)
    add("--stages", nargs="*", default=["write", "train", "measure"], choices=[*PARTS])
    add("--methods", nargs="*", default=["ngram", "eagle3", "medusa"])
    add("--setting", action="append", default=[], help="of every engine: NAME=VALUE")
    add("--seed", type=int, default=0)
    add("--samples", type=int, default=3000, help="answers that are written")
    add("--tokens", type=int, default=256, help="most of an answer, written or measured")
    add("--long", type=int, default=512, help="of answers that many requests get at once, whatever they say")
    add("--temperature", type=float, default=0.8, help="of what is written, but for every other text: those are greedy")
    add("--heads", type=int, default=4, help="drafts in a row that are learnt, and made")
    add("--steps", type=int, help="of training, in place of epochs")
    add("--epochs", type=int, default=3)
    add("--batch-tokens", type=int, default=8192)
    add("--learning-rate", type=float)
    add("--draft-vocab", type=int)
    add("--option", action="append", default=[], help="of training: NAME=VALUE, for methods that know it")
    add("--single", type=int, default=24, help="held-out prompts, one at a time")
    add("--copies", type=int, default=12, help="copies, one at a time")
    add("--concurrent", type=int, default=256, help="held-out prompts at once")
    add("--repeats", type=int, default=2, help="turns of each engine, one request at a time")
    add("--concurrent-repeats", type=int, default=5, help="turns of each engine, many at once")
    add("--turns", type=int, default=40, help="of each engine, where steps are measured")
    add("--cache", default="6GiB", help="of each engine that is measured")
    add("--measured-temperature", type=float, default=0.0)
    add("--fixed", action="store_true", help="always draft the full number (speculative.adaptive: false)")
    add("--part", default="", help=argparse.SUPPRESS)
    return made


def run_part(args: argparse.Namespace) -> None:
    """Run one part of a stage."""
    stage, _, method = args.part.partition(" ")
    {"write": write, "train": train, "serve": serve}[stage](args, method)


def say(**figures: Any) -> None:
    """Print a figure."""
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps(rounded), flush=True)


def questions(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return questions to train on, and held-out ones; no question is in both."""
    found = [form.format(topic) for topic in TOPICS for form in FORMS]
    pairs = [form.format(f"{one} and {other}") for one, other in pairwise(TOPICS) for form in FORMS]
    pairs += [
        form.format(f"{one} or {other}") for one, other in zip(TOPICS, TOPICS[9:], strict=False) for form in FORMS
    ]
    shuffle = random.Random(args.seed).shuffle
    shuffle(found)
    shuffle(pairs)
    held = max(args.single, args.concurrent, args.copies)
    return [*found[held:], *pairs], found[:held]


def engine(args: argparse.Namespace, **settings: Any) -> Any:
    """Return an engine for the model."""
    from jackfield import LLM

    given = dict(one.split("=", 1) for one in args.setting)
    return LLM(args.model, **{"enable_prefix_caching": False, "max_model_len": 2048, **settings, **given})


def chats(llm: Any, texts: Sequence[str]) -> list[dict[str, list[int]]]:
    """Return prompts that ask an assistant."""
    template = llm.get_tokenizer().apply_chat_template
    return [{"prompt_token_ids": template([{"role": "user", "content": text}], tokenize=True)} for text in texts]


def write(args: argparse.Namespace, method: str) -> None:
    """Let the model answer, and keep prompts with answers as token ids."""
    from jackfield import SamplingParams

    asked, _ = questions(args)
    texts = [asked[at % len(asked)] for at in range(args.samples)]
    llm = engine(args)
    # A question may come again, with another answer.
    temperatures = [0.0 if (at + at // len(asked)) % 2 else args.temperature for at in range(len(texts))]
    params = [
        SamplingParams(temperature=temperature, max_tokens=args.tokens, seed=args.seed + at)
        for at, temperature in enumerate(temperatures)
    ]
    began = time.perf_counter()
    outputs = llm.generate(chats(llm, texts), params)
    seconds, tokens = time.perf_counter() - began, 0
    with (args.out / "text.jsonl").open("w", encoding="utf-8") as file:
        for output in outputs:
            answer = output.outputs[0].token_ids
            tokens += len(answer)
            file.write(json.dumps({"token_ids": [*output.prompt_token_ids, *answer]}) + "\n")
    say(part="write", samples=len(texts), tokens=tokens, seconds=seconds, tokens_per_s=tokens / seconds)
    llm.shutdown()


def train(args: argparse.Namespace, method: str) -> None:
    """Train a method's checkpoint."""
    from jackfield.training import TrainingSettings, TrainingStep, train_drafter

    options: dict[str, Any] = {"heads": args.heads}
    if method == "eagle3" and args.draft_vocab:
        options["draft_vocab"] = args.draft_vocab
    options |= {name: json.loads(value) for name, value in (one.split("=", 1) for one in args.option)}
    wish = TrainingSettings(
        steps=args.steps,
        epochs=None if args.steps else args.epochs,
        batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate,
        holdout=0.03,
        options=options,
    )
    told = [0.0]

    def tell(step: TrainingStep) -> None:
        if step.step in (1, step.steps) or time.perf_counter() - told[0] > 5:
            told[0] = time.perf_counter()
            say(part="train", method=method, step=step.step, steps=step.steps, loss=step.loss, tokens=step.tokens)

    given = dict(one.split("=", 1) for one in args.setting)
    text, folder = args.out / "text.jsonl", args.out / method
    done = train_drafter(args.model, text, folder, method=method, training=wish, tell=tell, seed=args.seed, **given)
    for when, figures in (("before", done.before), ("after", done.after)):
        places = [round(share, 4) for share in figures.places] if figures else []
        in_a_row = figures.accepted if figures else 0.0
        say(part="train", method=method, when=when, right=places, in_a_row=in_a_row, seconds=done.seconds)


class Measured:
    """An engine in a process of its own, with a drafter or without. It is ready when this returns."""

    def __init__(self, method: str) -> None:
        self.method = method
        again = [sys.executable, *sys.argv, "--part", f"serve {method}"]
        self._process = subprocess.Popen(again, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        say(**self._answer())

    def run(self, work: str) -> dict[str, Any]:
        """Let it do some work, and return the figures."""
        assert self._process.stdin is not None
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        sys.exit(f"failed: {self.method}")


def compare(args: argparse.Namespace) -> None:
    """Let engines with and without drafters take turns, and tell medians."""
    engines = [Measured(method) for method in (PLAIN, *args.methods)]
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for work, turns in zip(WORKS, (args.repeats, args.repeats, args.concurrent_repeats), strict=True):
        for turn in range(turns if getattr(args, "copies" if work == "copy" else work) else 0):
            for one in engines[:: -1 if turn % 2 else 1]:
                figures = one.run(work)
                say(part="measure", method=one.method, work=work, run=turn, **figures)
                rates[work][one.method].append(figures["tokens_per_s"])
    for work, by_method in rates.items():
        for method, found in by_method.items():
            ratios = [mine / plain for mine, plain in zip(found, by_method[PLAIN], strict=True)]
            extremes = {"least": min(ratios), "most": max(ratios)}
            say(part="median", method=method, work=work, tokens_per_s=median(found), ratio=median(ratios), **extremes)
    for one in engines:
        one.close()


def speculative(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """Return the settings of an engine with one drafter, or without."""
    settings: dict[str, Any] = {"kv_cache_memory": args.cache}
    if method != PLAIN:
        settings |= {"speculative.method": method, "speculative.num_speculative_tokens": args.heads}
        settings |= {"speculative.adaptive": not args.fixed}
    if method in TRAINED:
        settings["speculative.model"] = str(args.out / method)
    return settings


def steps(args: argparse.Namespace) -> None:
    """Tell medians of steps, by the wall's clock and by the processor's, and of ratios to steps without drafter of the
    same turn. The first engine comes once more, in the end: what it differs by from itself is noise.
    """
    from jackfield import SamplingParams

    names, (_, held) = [PLAIN, *args.methods, f"{PLAIN} again"], questions(args)
    engines = {name: engine(args, **speculative(args, name.split()[0])) for name in names}
    most = (TURN + BETWEEN) * (args.turns + 2)
    for llm in engines.values():
        for prompt in chats(llm, held[: args.concurrent]):
            llm.enqueue(prompt, SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True))
        for _ in range(TURN):
            llm._advance()
    gc.collect()
    gc.freeze()
    clocks = (time.perf_counter, time.process_time)
    found: dict[str, list[list[float]]] = {name: [[], []] for name in names}
    order, shuffle = list(names), random.Random(args.seed).shuffle
    for _ in range(args.turns):
        shuffle(order)
        for name in order:
            for _ in range(BETWEEN):
                engines[name]._advance()
            began = [clock() for clock in clocks]
            for _ in range(TURN):
                engines[name]._advance()
            for times, clock, start in zip(found[name], clocks, began, strict=True):
                times.append((clock() - start) / TURN * 1e6)
    for name, (wall, cpu) in found.items():
        ratios = sorted(plain / mine for plain, mine in zip(found[PLAIN][0], wall, strict=True))
        middle = [round(ratios[at * len(ratios) // 4], 4) for at in (1, 3)]
        figures = {"us": median(wall), "least_us": min(wall), "cpu_us": median(cpu), "ratio": median(ratios)}
        say(part="steps", method=name, sequences=args.concurrent, **figures, quartiles=middle)
    for llm in engines.values():
        llm.wait_for_completion()
        llm.shutdown()


def serve(args: argparse.Namespace, method: str) -> None:
    """Start an engine with one drafter, or without, and do each work that a line of the input names."""
    began = time.perf_counter()
    llm = engine(args, **speculative(args, method))
    seconds, (_, held) = time.perf_counter() - began, questions(args)
    copies = [COPY.format(text) for text in passages(args, llm)][: args.copies]
    works = {
        "single": (chats(llm, held[: args.single]), 1, args.tokens, False),
        "copy": (chats(llm, copies), 1, args.tokens, False),
        "concurrent": (chats(llm, held[: args.concurrent]), max(1, args.concurrent), args.long, True),
    }
    timed(args, llm, works["single"][0][:2], 1, args.tokens)
    timed(args, llm, works["concurrent"][0], max(1, args.concurrent), 8)
    # As the engine process of a server does: what was made until now need not be looked at in the middle of a step.
    gc.collect()
    gc.freeze()
    say(part="ready", method=method, seconds=seconds)
    for line in sys.stdin:
        prompts, at_once, tokens, whole = works[line.strip()]
        say(**timed(args, llm, prompts, at_once, tokens, whole=whole))
    llm.shutdown()


def passages(args: argparse.Namespace, llm: Any) -> Iterator[str]:
    """Yield texts that the model wrote, without prompts' marks."""
    with (args.out / "text.jsonl").open(encoding="utf-8") as file:
        for line in file:
            yield llm.get_tokenizer().decode(json.loads(line)["token_ids"][-160:-8])


def timed(
    args: argparse.Namespace, llm: Any, prompts: Sequence[Any], at_once: int, most: int, *, whole: bool = False
) -> dict[str, Any]:
    """Return rates of tokens, and what became of drafts, over prompts that run ``at_once`` and get at ``most`` so many
    tokens; all of them, where answers are to be ``whole``.
    """
    from jackfield import SamplingParams

    params = SamplingParams(temperature=args.measured_temperature, max_tokens=most, ignore_eos=whole)
    before, began, outputs = llm.get_metrics(), time.perf_counter(), []
    for start in range(0, len(prompts), at_once):
        outputs += llm.generate(list(prompts[start : start + at_once]), params)
    seconds, after = time.perf_counter() - began, llm.get_metrics()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    rounds = after.draft_rounds - before.draft_rounds
    proposed = after.drafts_proposed - before.drafts_proposed
    kept = after.drafts_accepted - before.drafts_accepted
    places = [
        round((new - old) / max(1, rounds), 4)
        for new, old in zip_longest(after.accepted_per_position, before.accepted_per_position, fillvalue=0)
    ]
    return {
        "requests": len(prompts),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "rounds": rounds,
        "drafts": proposed,
        "kept_share": kept / max(1, proposed),
        "tokens_per_round": 1 + kept / max(1, rounds),
        "kept_by_place": places,
    }


if __name__ == "__main__":
    main()
