"""The fine-tune's pairs, its tokens and its checkpoints; `test_run_files` trains it."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
import transformers
from pyarrow import parquet
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from examples import fine_tune
from examples.fine_tune import Options
from jaxddp.config import TrainConfig
from jaxddp.errors import InputError
from jaxddp.nn.functional import Functional
from jaxddp.nn.torch_weights import to_torch

TSV = """\
\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String
1\t7\t8\tHe said "yes.\tThe word was "yes", he said.
0\t9\t10\tIt is late.\tThe late train is here.
"""


def test_mrpc_is_read_as_published(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TSV, encoding="utf-8")
    expected = [('He said "yes.', 'The word was "yes", he said.', 1), ("It is late.", "The late train is here.", 0)]
    assert fine_tune.read(tmp_path / "train.txt") == expected
    firsts, seconds, labels = map(list, zip(*expected, strict=True))
    columns = {"sentence1": firsts, "sentence2": seconds, "label": labels, "idx": [0, 1]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    assert fine_tune.read(tmp_path / "train.parquet") == expected


@pytest.mark.parametrize(
    "content",
    ["a\tb\n1\t2\n", TSV.replace("\n0\t", "\n2\t"), TSV + "1\t3\n"],
    ids=["columns", "label", "short"],
)
def test_another_file_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "given.txt").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"^--data .*given\.txt: pair [123]: must have #1 String, #2 String, Qual"):
        fine_tune.read(tmp_path / "given.txt")


def test_made_pairs_are_distinct_balanced_and_split() -> None:
    made = fine_tune.made(640)
    assert len({pair[:2] for pair in made}) == 640 and made == fine_tune.made(640)
    assert 0.45 < np.mean([label for *_, label in made]) < 0.55
    train, test = fine_tune.train_data(Options()), fine_tune.test_data(Options())
    assert (len(train["labels"]), len(test["labels"])) == (512, 128)
    rows = [{ids.tobytes() for ids in part["input_ids"]} for part in (train, test)]
    assert len(rows[0]) == 512 and not rows[0] & rows[1]


def test_sentences_are_concatenated_padded_on_the_right_and_truncated() -> None:
    config, arrays = fine_tune.material(Options())
    ids, mask = arrays["input_ids"], arrays["attention_mask"]
    assert ids.shape[1] % 8 == 0 and (ids[mask == 0] == config.pad_token_id).all()
    assert all(row.tolist() == sorted(row.tolist(), reverse=True) for row in mask)
    cut = fine_tune.material(Options(max_length=3))[1]
    assert (cut["attention_mask"].sum(axis=1) == 3).all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model's folder like SmolLM2's: tied embeddings, bfloat16, a tokenizer, no padding token."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[fine_tune.PADDING], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([first for first, *_ in fine_tune.made(50)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = dataclasses.replace(fine_tune.SIZES, vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=1)
    config = transformers.LlamaConfig(**sizes.of_transformers(), tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def test_both_sides_start_from_the_checkpoint(checkpoint: Path) -> None:
    options, saved = Options(model_folder=str(checkpoint)), load_file(checkpoint / "model.safetensors")
    torch.manual_seed(0)
    of_torch = {name: x.float().numpy() for name, x in fine_tune.torch_model(options).state_dict().items()}
    model = Functional(fine_tune.jax_model(options, TrainConfig()))
    of_flax = to_torch({**model.params, **model.buffers})
    assert of_flax.keys() == of_torch.keys() == saved.keys() | {"score.weight"}
    for name in saved:
        assert np.array_equal(of_flax[name], saved[name].astype(np.float32)), name
        assert np.array_equal(of_torch[name], of_flax[name]), name


def test_a_mismatched_tokenizer_is_reported_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    shutil.copy(checkpoint / "tokenizer.json", tmp_path)
    for change, message in (
        ({"vocab_size": 99}, "fit a model of 99"),
        ({"pad_token_id": -1}, "padding -1 do not"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        fine_tune.material.cache_clear()
        with pytest.raises(InputError, match=rf"^--model-folder .* tokens and .*{message}"):
            fine_tune.material(Options(model_folder=str(tmp_path)))
