"""Draft checkpoints that are trained here: their drafts get better, and their files are what the drafters read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gguf
import pytest
import torch
from engines import Engine, Models
from gguf_writer import write_gguf
from hf import Tiny, random_prompts
from safetensors.torch import load_file
from speculation_drafters import TestDrafter, watch
from trained_drafts import VOCAB, WIDTH, Learnable, answers, kept, make_learnable

from jackfield import LLM
from jackfield.cli import main
from jackfield.engine.core import worker_spec
from jackfield.engine.setup import prepare
from jackfield.errors import ConfigError
from jackfield.interfaces import Agreement, DraftTrainer, Option, Settings, TrainedDraft, TrainerEnv, TrainingBatch
from jackfield.training import Measured, TrainingResult, TrainingSettings, TrainingStep, train_drafter
from jackfield.training.target import LoadedTarget, RunLimits, TargetRunner
from jackfield_models.llama import Llama
from jackfield_spec_decode.eagle_trainer import Eagle3Trainer

METHODS = ("eagle3", "medusa")
HEADS = 3
STEPS = 40


@pytest.fixture(scope="module")
def learnable(tmp_path_factory: pytest.TempPathFactory) -> Learnable:
    return make_learnable(tmp_path_factory.mktemp("learnable"))


def train(learnable: Learnable, output: Path, method: str, target: Path | None = None, **wish: Any) -> TrainingResult:
    options = {"heads": HEADS, **wish.pop("options", {})}
    settings = {"steps": STEPS, "batch_tokens": 512, "learning_rate": 1e-2, "holdout": 0.2, **wish}
    seed = settings.pop("seed", 3)
    training = TrainingSettings(options=options, **settings)
    model = str(target or learnable.folder)
    return train_drafter(model, learnable.text, output, method=method, training=training, seed=seed)


@pytest.fixture(scope="module")
def trained(learnable: Learnable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainingResult]:
    return {method: train(learnable, tmp_path_factory.mktemp(method) / "draft", method) for method in METHODS}


def drafting(engine: Engine, target: Path, method: str, draft: Path) -> LLM:
    speculative: dict[str, Any] = {"speculative.method": method, "speculative.model": str(draft)}
    speculative |= {"speculative.num_speculative_tokens": HEADS, "speculative.adaptive": False}
    return engine(target, **speculative)


@pytest.mark.parametrize("method", METHODS)
def test_drafts_get_better_and_change_no_token(
    engine: Engine, learnable: Learnable, trained: dict[str, TrainingResult], tmp_path: Path, method: str
) -> None:
    result = trained[method]
    assert result.steps == STEPS
    before, after = result.before, result.after
    assert before is not None and after is not None
    assert len(before.places) == len(after.places) == HEADS
    assert after.accepted > before.accepted + 0.7
    assert all(new > old + 0.2 for old, new in zip(before.places, after.places, strict=True))
    untrained = train(learnable, tmp_path / "untrained", method, steps=1, learning_rate=1e-12).folder
    rates, expected = [], answers(engine(learnable.folder), learnable.prompts)
    for draft in (untrained, result.folder):
        llm = drafting(engine, learnable.folder, method, draft)
        assert answers(llm, learnable.prompts) == expected
        rates.append(kept(llm))
    assert rates[1] > rates[0] + 0.6


def test_training_goes_on_from_a_checkpoint(
    learnable: Learnable, trained: dict[str, TrainingResult], tmp_path: Path
) -> None:
    first = trained["eagle3"]
    options = {"initial": str(first.folder)}
    again = train(learnable, tmp_path / "again", "eagle3", options=options, steps=1, learning_rate=1e-12)
    assert again.before is not None and first.after is not None and again.after is not None
    # What lies in the file is rounded to the target's type.
    assert again.before.accepted == pytest.approx(first.after.accepted, abs=0.02)
    before, after = (load_file(result.folder / "model.safetensors") for result in (first, again))
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name].float(), after[name].float(), atol=1e-6) for name in before)


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"initial": "nowhere"}, "--option initial", "no model.safetensors"),
        ({"intermediate_size": 24}, "--option initial", "other sizes"),
        ({"draft_vocab": 8}, "--draft-vocab", "a head of"),
    ],
)
def test_what_training_cannot_go_on_from(
    learnable: Learnable,
    trained: dict[str, TrainingResult],
    tmp_path: Path,
    options: dict[str, Any],
    field: str,
    words: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        train(learnable, tmp_path / "again", "eagle3", options={"initial": str(trained["eagle3"].folder), **options})
    assert caught.value.field == field and words in caught.value.message


def shapes(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.dtype) for name, t in load_file(folder / "model.safetensors").items()}


def test_eagle3_is_written_as_published(trained: dict[str, TrainingResult]) -> None:
    folder, half = trained["eagle3"].folder, torch.bfloat16
    config = json.loads((folder / "config.json").read_text())
    words = config["draft_vocab_size"]
    layer = {
        "self_attn.q_proj": (64, 2 * WIDTH),
        "self_attn.k_proj": (32, 2 * WIDTH),
        "self_attn.v_proj": (32, 2 * WIDTH),
        "self_attn.o_proj": (WIDTH, 64),
        "mlp.gate_proj": (96, WIDTH),
        "mlp.up_proj": (96, WIDTH),
        "mlp.down_proj": (WIDTH, 96),
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (WIDTH,)),
    }
    assert shapes(folder) == {
        **{f"midlayer.{name}.weight": (shape, half) for name, shape in layer.items()},
        "fc.weight": ((WIDTH, 3 * WIDTH), half),
        "norm.weight": ((WIDTH,), half),
        "lm_head.weight": ((words, WIDTH), half),
        "d2t": ((words,), torch.int64),
        "t2d": ((VOCAB,), torch.bool),
    }
    tensors = load_file(folder / "model.safetensors")
    ids = torch.arange(words) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()
    assert words % 64 == 0 and words < VOCAB
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["num_hidden_layers"], config["vocab_size"], config["hidden_size"]) == (1, VOCAB, WIDTH)
    assert config["max_position_embeddings"] == 512
    assert "eagle_aux_hidden_state_layer_ids" not in config


def test_medusa_is_written_as_published(
    engine: Engine, learnable: Learnable, trained: dict[str, TrainingResult], tmp_path: Path
) -> None:
    half = torch.bfloat16
    blocks = {f"blocks.{head}.layers.0.weight": ((WIDTH, WIDTH), half) for head in range(HEADS)}
    head = ((VOCAB, WIDTH), half)
    shared = trained["medusa"].folder
    assert shapes(shared) == {**blocks, "lm_head.weight": head}
    config = json.loads((shared / "config.json").read_text())
    assert (config["architectures"], config["num_heads"], config["original_lm_head"]) == (["MedusaModel"], HEADS, True)
    weight = learnable.tiny.model.lm_head.weight
    assert torch.equal(load_file(shared / "model.safetensors")["lm_head.weight"], weight.to(half))
    own = train(learnable, tmp_path / "own", "medusa", steps=3, options={"train_head": True, "layers": 2}).folder
    deeper = {f"blocks.{head}.layers.1.weight": ((WIDTH, WIDTH), half) for head in range(HEADS)}
    assert shapes(own) == {**blocks, **deeper, **{f"lm_heads.{number}.weight": head for number in range(HEADS)}}
    learnt = load_file(own / "model.safetensors")
    assert not torch.equal(learnt["lm_heads.0.weight"], weight.to(half))
    assert not torch.equal(learnt["lm_heads.0.weight"], learnt["lm_heads.1.weight"])
    llm = drafting(engine, learnable.folder, "medusa", own)
    assert answers(llm, learnable.prompts[:2]) == answers(engine(learnable.folder), learnable.prompts[:2])


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_makes_it_repeatable(learnable: Learnable, tmp_path: Path, method: str) -> None:
    made = [train(learnable, tmp_path / str(at), method, steps=3, seed=seed) for at, seed in enumerate((5, 5, 6))]
    same, again, other = (load_file(one.folder / "model.safetensors") for one in made)
    assert all(torch.equal(same[name], again[name]) for name in same)
    assert made[0].loss == made[1].loss != made[2].loss
    assert made[0].after == made[1].after
    assert any(not torch.equal(same[name], other[name]) for name in same if name in other)


def test_training_leaves_torchs_random_numbers_alone(learnable: Learnable, tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    train(learnable, tmp_path / "draft", "eagle3", steps=1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_gguf_file_is_a_target(engine: Engine, learnable: Learnable, tmp_path: Path, method: str) -> None:
    target = tmp_path / "target.gguf"
    write_gguf(learnable.tiny.model, target, "llama", gguf.GGMLQuantizationType.Q8_0)
    result = train(learnable, tmp_path / "draft", method, target)
    assert result.before is not None and result.after is not None
    assert result.after.accepted > result.before.accepted + 0.7
    llm = drafting(engine, target, method, result.folder)
    assert answers(llm, learnable.prompts) == answers(engine(target), learnable.prompts)
    assert kept(llm) > 0.6


def test_what_is_unrolled_is_what_drafts(
    engine: Engine, learnable: Learnable, trained: dict[str, TrainingResult]
) -> None:
    """The steps that a layer is trained on are those of the drafter: in each, the same tokens are most likely."""
    llm = drafting(engine, learnable.folder, "eagle3", trained["eagle3"].folder)
    seen = watch(llm)
    prompts = random_prompts((3, 9, 21), seed=8)
    answers(llm, prompts)
    tensors = load_file(trained["eagle3"].folder / "model.safetensors")
    ids_D = tensors.pop("d2t") + torch.arange(len(tensors["lm_head.weight"]))
    del tensors["t2d"]
    trainer = Eagle3Trainer(env(learnable.tiny, {"heads": HEADS, "draft_vocab": len(ids_D)}))
    network: Any = trainer.module
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    model, compared = learnable.tiny.model.model, 0
    for text, drafts in seen:
        if len(drafts) < HEADS:
            continue
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
            # hidden_states[i] is the input of layer i. What drafts stand on, the target has not computed.
            taps = torch.cat([states[i] for i in (2, 3, 3)], -1)
            taps = torch.cat((taps, torch.full((1, HEADS, taps.shape[-1]), 9.0)), 1)
            embeds = model.embed_tokens(torch.tensor([[*text, *drafts]]))
            for step, states_BLE in enumerate(network(embeds, taps, HEADS)):
                logits_D = network.lm_head(states_BLE[0, len(text) - 2])
                draft = int((ids_D == drafts[step]).nonzero())
                assert float(logits_D.max() - logits_D[draft]) < 1e-3, step
                compared += 1
    assert compared > 60


def env(tiny: Tiny, options: dict[str, Any]) -> TrainerEnv:
    """Return what a trainer is made from, for a target in transformers."""
    prepared = prepare(str(tiny.folder), None, {}, skip_tokenizer_init=True)
    resolution = prepared.resolution
    return TrainerEnv(
        target=HfTarget(tiny.model),
        config=resolution.model_config,
        keys=resolution.facts.config,
        groups=resolution.architecture.attention_groups(resolution.model_config),
        counts=torch.ones(VOCAB, dtype=torch.int64),
        device=torch.device("cpu"),
        settings=Settings({"draft_vocab": None, "intermediate_size": None, "initial": "", **options}),
    )


class HfTarget:
    def __init__(self, model: Any) -> None:
        self._model = model

    def embed(self, ids_N: torch.Tensor) -> torch.Tensor:
        return self._model.model.embed_tokens(ids_N)  # type: ignore[no-any-return]

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return self._model.lm_head(hidden_NE)  # type: ignore[no-any-return]

    def head(self, ids_N: torch.Tensor | None = None) -> torch.Tensor:
        weight: torch.Tensor = self._model.lm_head.weight.detach()
        return weight if ids_N is None else weight[ids_N]


@pytest.mark.parametrize("name", ["llama_tied", "qwen2"])
def test_the_targets_states_are_the_references(models: Models, name: str) -> None:
    """Pieces of a batch do not see one another, also with windows; slots and blocks are used again."""
    tiny, taps, targets = models[name], (0, 2), []

    def look(target: LoadedTarget) -> tuple[int, ...]:
        targets.append(target)
        return taps

    prepared = prepare(str(tiny.folder), None, {"dtype": "float32"}, skip_tokenizer_init=True)
    runner = TargetRunner(worker_spec(prepared.resolution), RunLimits(rows=4, tokens=200, length=60), look)
    for lengths in ((60, 3, 33, 17), (5, 50)):
        prompts = random_prompts(lengths, seed=len(lengths))
        batch = runner.run([torch.tensor(prompt).int().numpy() for prompt in prompts])
        assert batch.lengths.tolist() == list(lengths)
        for row, prompt in enumerate(prompts):
            with torch.no_grad():
                out = tiny.model.model(torch.tensor([prompt]), output_hidden_states=True)
            length = len(prompt)
            assert batch.ids[row].tolist() == prompt + [0] * (max(lengths) - length)
            torch.testing.assert_close(batch.hidden[row, :length], out.last_hidden_state[0], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(batch.taps[0][row, :length], out.hidden_states[1][0], rtol=1e-3, atol=1e-3)
            assert not batch.hidden[row, length:].any() and not batch.taps[1][row, length:].any()
    weight, target = tiny.model.lm_head.weight, targets[0]
    ids = torch.tensor([[3, 250, 7]])
    torch.testing.assert_close(target.head(), weight)
    torch.testing.assert_close(target.head(ids[0]), weight[ids[0]])
    torch.testing.assert_close(target.embed(ids), tiny.model.model.embed_tokens(ids))
    torch.testing.assert_close(target.logits(batch.hidden[0, :5]), batch.hidden[0, :5] @ weight.T, rtol=1e-4, atol=1e-4)


class Shift(DraftTrainer):
    """A stranger's: learns to add a number to the last token's id."""

    def __init__(self, env: TrainerEnv) -> None:
        self.module = linear = torch.nn.Linear(1, 1, bias=False)
        self.weight, self._offset = linear.weight, env.settings["offset"]

    def losses(self, batch: TrainingBatch) -> Iterator[torch.Tensor]:
        for part in (1.0, 2.0):
            yield part * (self.weight - self._offset).square().sum()

    def agreement(self, batch: TrainingBatch) -> Agreement:
        right = (self.weight - self._offset).abs() < 0.5
        return Agreement(right, torch.ones_like(right))

    def checkpoint(self) -> TrainedDraft:
        return TrainedDraft({"architectures": ["Shift"]}, {"shift": self.weight})


class ShiftDrafter(TestDrafter):
    name = "shift"
    trainable: ClassVar[bool] = True
    training_options: ClassVar[dict[str, Option]] = {"offset": Option(int, 1)}

    @classmethod
    def trainer(cls, env: TrainerEnv) -> DraftTrainer:
        return Shift(env)


def test_a_strangers_drafter_is_trained_alike(learnable: Learnable, tmp_path: Path) -> None:
    told: list[TrainingStep] = []
    wish = TrainingSettings(steps=60, batch_tokens=512, learning_rate=0.2, holdout=0.5, options={"offset": 3})
    result = train_drafter(
        str(learnable.folder),
        learnable.text,
        tmp_path / "draft",
        method="shift",
        training=wish,
        plugins=(ShiftDrafter,),
        tell=told.append,
    )
    assert (result.before, result.after) == (Measured((0.0,), 0.0, 3), Measured((1.0,), 1.0, 3))
    assert [step.step for step in told] == list(range(1, 61))
    assert told[0].loss > 3 * told[-1].loss
    assert json.loads((result.folder / "config.json").read_text())["architectures"] == ["Shift"]
    assert load_file(result.folder / "model.safetensors")["shift"].item() == pytest.approx(3, abs=0.3)


REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "unknown": ({"method": "eagel3"}, "--method", "there is no drafter", "did you mean 'eagle3'"),
    "no trainer": ({"method": "ngram"}, "--method", "cannot be trained", "can be trained: eagle3, medusa"),
    "option": ({"options": {"hedas": 2}}, "--option hedas", "no option 'hedas'", "did you mean 'heads'"),
    "option of another": ({"method": "medusa", "options": {"draft_vocab": 9}}, "--option draft_vocab", "no option", ""),
    "too many tokens": ({"options": {"draft_vocab": 261}}, "--draft-vocab", "260 tokens", "from 1 to 260"),
    "too long": ({"max_length": 513, "batch_tokens": 600}, "--max-length", "512 tokens", "512 or less"),
    "diverged": ({"learning_rate": 0.99, "method": "broken"}, "--learning-rate", "diverged", "lower"),
    "no taps": ({"method": "deep"}, "--method", "shows none", "last hidden state"),
}


class Broken(Shift):
    def losses(self, batch: TrainingBatch) -> Iterator[torch.Tensor]:
        yield (self.weight * float("nan")).sum()


class Deep(Shift):
    taps = (1,)


class BrokenDrafter(ShiftDrafter):
    name = "broken"

    @classmethod
    def trainer(cls, env: TrainerEnv) -> DraftTrainer:
        return Broken(env)


class DeepDrafter(ShiftDrafter):
    name = "deep"

    @classmethod
    def trainer(cls, env: TrainerEnv) -> DraftTrainer:
        return Deep(env)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused(
    learnable: Learnable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    wish, field, words, remedy = REFUSED[case]
    if case == "no taps":
        monkeypatch.setattr(Llama, "features", Llama.features - {"taps"})
    training = TrainingSettings(**{"steps": 2, **{key: value for key, value in wish.items() if key != "method"}})
    with pytest.raises(ConfigError) as caught:
        train_drafter(
            str(learnable.folder),
            learnable.text,
            tmp_path / "draft",
            method=wish.get("method", "eagle3"),
            training=training,
            plugins=(BrokenDrafter, DeepDrafter) if case in ("diverged", "no taps") else (),
        )
    assert caught.value.field == field
    assert words in caught.value.message
    assert remedy in caught.value.remedy
    assert not (tmp_path / "draft").exists()


def test_a_folder_that_holds_something_is_refused(learnable: Learnable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        train(learnable, tmp_path, "eagle3")


def test_the_command(learnable: Learnable, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "draft"
    line = ["train-drafter", "--method", "medusa", str(learnable.folder), "--text", str(learnable.text), "--heads", "2"]
    line += ["--batch-tokens", "512", "--seed", "1", "--train-head", "--option", "layers=2"]
    assert main([*line, "--out", str(folder), "--steps", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == str(folder)
    assert [row.split()[0] for row in out.splitlines()[:-1]] == ["draft", "1", "2", "in"]
    assert "step 1 of 3: loss" in err and "step 3 of 3: loss" in err and "3 steps," in err
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_heads"], config["num_hidden_layers"], config["original_lm_head"]) == (2, 2, False)
    assert main([*line, "--out", str(tmp_path / "other"), "--epochs", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["folder"] == str(tmp_path / "other")
    assert len(figures["after"]["places"]) == 2
    assert figures["steps"] > 1
    assert main([*line, "--out", str(tmp_path / "third"), "--option", "layers"]) == 2
    assert "--option NAME=VALUE" in capsys.readouterr().err


def test_texts_are_read_with_the_targets_tokenizer(text_model: Tiny, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\njumps over the lazy dog\n\nagain and again\n")
    wish = TrainingSettings(epochs=1, holdout=0.34, batch_tokens=64, options={"heads": 1, "draft_vocab": 32})
    folder = train_drafter(str(text_model.folder), text, tmp_path / "draft", method="eagle3", training=wish).folder
    tensors = load_file(folder / "model.safetensors")
    known = {chr(one) for one in tensors["t2d"].nonzero().flatten().tolist() if one < 128}
    assert {" ", "a", "e"} <= known
    assert len(tensors["d2t"]) == 32


def test_few_layers_are_named_in_the_checkpoint(engine: Engine, models: Models, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"token_ids": prompt}) for prompt in random_prompts((20, 30, 40))))
    target = models["llama"].folder
    wish = TrainingSettings(steps=1, holdout=0, options={"heads": HEADS})
    result = train_drafter(str(target), text, tmp_path / "draft", method="eagle3", training=wish)
    assert result.before is None and result.after is None
    config = json.loads((result.folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 1, 3]
    llm = drafting(engine, target, "eagle3", result.folder)
    prompts = random_prompts((4, 12))
    assert answers(llm, prompts) == answers(engine(target), prompts)
    assert llm.get_metrics().draft_rounds > 0
