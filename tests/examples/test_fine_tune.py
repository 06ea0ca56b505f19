"""Fine-tune example: its claims in both frameworks, and the files that it reads."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import transformers
from pyarrow import parquet
from safetensors.numpy import load_file

from examples.fine_tune import __main__ as program
from examples.fine_tune import claims, in_jax, in_torch, material, pairs, tokens
from examples.fine_tune.job import Job, Run
from examples.fine_tune.options import Options
from jaxddp import Replicas, prepare
from jaxddp.cli import one_line_errors
from jaxddp.errors import InputError

pytestmark = pytest.mark.large

ALIKE, STEPS_ALIKE = 0.03, 10  # losses in bfloat16, which diverge later by rounding [measured: 2.4e-3]
OPTIONS = Options(epochs=2, devices=2, platform="cpu", dtype="bfloat16")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make the configuration of a model with one layer, and two jobs: the proof and the fine-tune."""
    folder = tmp_path_factory.mktemp("fine_tune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(material, "SMALL", dataclasses.replace(material.SMALL, num_hidden_layers=1))
        config = material.put(OPTIONS, folder)
    sizes = material.sizes(config)
    return config, [Job(sizes, str(folder), "float64", 10, whole=True), Job(sizes, str(folder), "bfloat16")]


@pytest.fixture(scope="module")
def in_both(jobs: Any) -> tuple[list[Run], list[Run]]:
    config, both_jobs = jobs
    replicas = Replicas(prepare(2, "cpu"))
    ours = [in_jax.run(OPTIONS.training(), config, job, replicas) for job in both_jobs]
    return ours, in_torch.run(OPTIONS.training(), both_jobs)


def test_both_frameworks_take_the_same_steps_in_float64(in_both: Any) -> None:
    (ours, _), (theirs, _) = in_both
    proof = claims.proof(ours, theirs)
    assert len(proof) == 5 and all(claim.holds for claim in proof), proof


def test_the_model_learns_in_bfloat16_and_rounds_like_transformers(in_both: Any) -> None:
    ours, theirs = in_both
    fine_tuned = ours[1], theirs[1]
    assert claims.rounding("bfloat16", *fine_tuned, theirs[0]).holds
    apart = np.abs(np.subtract(*(run.losses[:STEPS_ALIKE] for run in fine_tuned)))
    assert apart.max() < ALIKE, apart
    falls, right = claims.learning("bfloat16", 0.5, *fine_tuned)
    assert falls.holds, falls
    assert isinstance(right.jax, float) and 0 < right.jax < 1  # two epochs are too few to beat chance


def test_claims_fail_for_another_order_of_the_pairs(in_both: Any, jobs: Any) -> None:
    config, (job, _) = jobs
    other_order = dataclasses.replace(OPTIONS, seed=1).training()
    ours = in_jax.run(other_order, config, job, Replicas(prepare(2, "cpu")))
    held = [claim.holds for claim in claims.proof(ours, in_both[1][0])]
    assert held == [True, False, False, False, True]  # logits, gradients, losses, parameters; transformers' rounding


# ---- data


TSV = """\
\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String
1\t7\t8\tHe said "yes.\tThe word was "yes", he said.
0\t9\t10\tIt is late.\tThe late train is here.
"""


def test_mrpc_is_read_as_published(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TSV, encoding="utf-8")
    expected = [('He said "yes.', 'The word was "yes", he said.', 1), ("It is late.", "The late train is here.", 0)]
    assert pairs.read(tmp_path / "train.txt") == expected
    firsts, seconds, labels = map(list, zip(*expected, strict=True))
    columns = {"sentence1": firsts, "sentence2": seconds, "label": labels, "idx": [0, 1]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    assert pairs.read(tmp_path / "train.parquet") == expected


def test_made_pairs_are_distinct_and_balanced() -> None:
    made = pairs.made(640)
    assert len({pair[:2] for pair in made}) == 640 and made == pairs.made(640)
    assert 0.45 < np.mean([label for *_, label in made]) < 0.55
    train, held_out = pairs.split(made)
    assert (len(train), len(held_out)) == (512, 128) and not set(train) & set(held_out)


def test_sentences_of_a_pair_are_concatenated_and_padded_on_the_right() -> None:
    train = [("He is here.", "He is.", 1), ("No.", "She is there, I think.", 0)]
    tokenizer = tokens.trained(train)
    arrays = tokens.encoded(tokenizer, {"train": train}, padding=0, longest=64)["train"]
    assert arrays["input_ids"].shape[1] % 8 == 0
    for ids, mask, (first, second, _) in zip(arrays["input_ids"], arrays["attention_mask"], train, strict=True):
        assert tokenizer.decode(ids[mask == 1].tolist()) == first + second
        assert not ids[mask == 0].any() and mask.tolist() == sorted(mask.tolist(), reverse=True)
    cut = tokens.encoded(tokenizer, {"train": train}, padding=0, longest=3)["train"]
    assert cut["attention_mask"].sum(axis=1).tolist() == [3, 3]


# ---- checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model's folder like SmolLM2's: tied embeddings, bfloat16, a tokenizer, no padding token."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = tokens.trained(pairs.made(100))
    tokenizer.save(str(folder / "tokenizer.json"))
    small = dataclasses.replace(material.SMALL, vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=1)
    config = transformers.LlamaConfig(**material.sizes(small), tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def test_both_frameworks_start_from_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    config = material.put(dataclasses.replace(OPTIONS, model_folder=checkpoint), tmp_path)
    assert config.pad_token_id == 0  # <|endoftext|>
    start, saved = load_file(tmp_path / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert start.keys() == saved.keys() | {"score.weight"}
    assert all(np.array_equal(start[name], saved[name].astype(np.float32)) for name in saved)


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("data", None, "not a readable text file"),
        ("data", "a\tb\n1\t2\n", r"no column Quality, #1 String, #2 String; has a, b"),
        ("data", TSV.replace("\n0\t", "\n2\t"), "label 2: must be 0 or 1"),
        ("data", TSV + "1\t3\n", "line 4 has too few columns"),
        ("data", TSV.partition("\n")[0], "no column"),
        ("model_folder", None, "no readable tokenizer.json"),
    ],
)
def test_bad_input_is_reported_in_one_line(tmp_path: Path, option: str, content: str | None, message: str) -> None:
    path = tmp_path / "given"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        material.put(dataclasses.replace(OPTIONS, **{option: path}), tmp_path)


def test_a_mismatched_tokenizer_is_reported_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    shutil.copy(checkpoint / "tokenizer.json", tmp_path)
    for change, message in (({"vocab_size": 99}, "tokens, its model 99"), ({"pad_token_id": -1}, "no token -1 to pad")):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=message):
            material.put(dataclasses.replace(OPTIONS, model_folder=tmp_path), tmp_path)


def test_bad_parquet_is_reported_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match="not a readable parquet file"):
        pairs.read(path)
    parquet.write_table(pyarrow.table({"sentence1": ["a"], "label": [1]}), path)
    with pytest.raises(InputError, match="no column sentence2; has sentence1, label"):
        pairs.read(path)


def test_bad_input_exits_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, one_line_errors(show_traceback=False):
        program.main(Options(platform="cpu", data=tmp_path / "absent.txt"))
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.startswith("error: --data ") and message.count("\n") == 1
