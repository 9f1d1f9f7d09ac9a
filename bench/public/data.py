"""Small synthetic datasets in the formats that public programs read.  Always the same for the same arguments.

``python -m public.data PROGRAM FOLDER`` writes what a program reads: in a process of its own, because some of it takes
the libraries that the program uses.
"""

from __future__ import annotations

import json
import pickle
import random
import struct
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "write_glue",
    "write_images",
    "write_instructions",
    "write_mnist",
    "write_pets",
    "write_resnet",
    "write_sine_waves",
    "write_text_corpus",
    "write_token_files",
]

SEED = 7
WORDS = tuple(
    f"{first}{second}"
    for first in ("ba", "de", "fo", "gu", "ki", "lo", "ma", "nu", "pe", "ri")
    for second in ("n", "l", "st", "rt", "m", "ck", "nd", "sh")
)


def write_mnist(root: Path, *, train: int, test: int) -> None:
    """The four files of ``torchvision.datasets.MNIST(root)``: a bright square whose place depends on the label."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    source = np.random.default_rng(SEED)
    for name, count in (("train", train), ("t10k", test)):
        labels = source.integers(0, 10, count, dtype=np.uint8)
        images = source.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            row, column = 4 + 10 * (int(label) // 5), 2 + 5 * (int(label) % 5)
            image[row : row + 5, column : column + 5] += 180
        (folder / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + images.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


def write_images(root: Path, *, train: int, test: int, test_name: str = "val", size: int = 96) -> None:
    """An ImageFolder tree: ``train/CLASS/N.jpg`` and the same for the test images; two classes."""
    for split, count in (("train", train), (test_name, test)):
        for number in range(count):
            name = ("bright", "dark")[number % 2]
            (root / split / name).mkdir(parents=True, exist_ok=True)
            _write_image(root / split / name / f"{number:04}.jpg", number, size)


def write_pets(root: Path, *, count: int, size: int = 96) -> None:
    """Images whose class is in their name, as accelerate's cv_example.py reads them."""
    root.mkdir(parents=True)
    for number in range(count):
        _write_image(root / f"{('cat', 'dog')[number % 2]}_{number}.jpg", number, size)


def _write_image(path: Path, number: int, size: int) -> None:
    from PIL import Image

    source = np.random.default_rng(SEED + number)
    pixels = source.integers(0, 128, (size, size, 3), dtype=np.uint8) + np.uint8(96 * (number % 2))
    Image.fromarray(pixels).save(path, quality=80)


def write_text_corpus(folder: Path, *, train_lines: int, other_lines: int = 40) -> None:
    """``train.txt``, ``valid.txt`` and ``test.txt`` with twenty words a line."""
    folder.mkdir(parents=True)
    source = random.Random(SEED)
    for name, lines in (("train", train_lines), ("valid", other_lines), ("test", other_lines)):
        (folder / f"{name}.txt").write_text("".join(" ".join(_words(source, 20)) + "\n" for _ in range(lines)))


def _words(source: random.Random, count: int) -> list[str]:
    """Each word makes a few others likely, so that there is something to learn."""
    at = source.randrange(len(WORDS))
    words = []
    for _ in range(count):
        words.append(WORDS[at])
        at = (3 * at + source.choice((1, 1, 1, 2, 5))) % len(WORDS)
    return words


def write_token_files(folder: Path, *, characters: int) -> None:
    """``train.bin``, ``val.bin`` and ``meta.pkl`` of nanoGPT's character-level data."""
    folder.mkdir(parents=True)
    text = " ".join(_words(random.Random(SEED), characters // 4))[:characters]
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    tokens = np.array([numbers[character] for character in text], dtype=np.uint16)
    cut = len(tokens) * 9 // 10
    tokens[:cut].tofile(folder / "train.bin")
    tokens[cut:].tofile(folder / "val.bin")
    meta = {"vocab_size": len(alphabet), "itos": dict(enumerate(alphabet)), "stoi": numbers}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def write_sine_waves(path: Path, *, waves: int, points: int) -> None:
    """What ``generate_sine_wave.py`` of time_sequence_prediction writes, with fewer and shorter waves."""
    import torch

    shifts = np.random.default_rng(SEED).integers(-80, 80, (waves, 1))
    # As bytes of numpy's own types, because train.py loads it with torch.load's safe unpickler.
    torch.save(np.sin((np.arange(points) + shifts) / 20.0), path)


def write_glue(folder: Path, *, train: int, test: int, layers: int = 2, width: int = 64) -> None:
    """What accelerate's NLP examples download: GLUE's MRPC, a small BERT with random weights, and its metric.

    The libraries prefer a local folder of that name to the Hub: ``nyu-mll/glue``, ``bert-base-cased``, ``glue``.
    """
    data = folder / "nyu-mll" / "glue"
    data.mkdir(parents=True)
    source = random.Random(SEED)
    splits = {"train": train, "validation": test, "test": test}
    for split, count in splits.items():
        rows = [_pair(source, number) for number in range(count)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    (data / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    _write_bert(folder / "bert-base-cased", layers=layers, width=width)
    metric = folder / "glue"
    metric.mkdir()
    (metric / "glue.py").write_text(METRIC)


def _pair(source: random.Random, number: int) -> dict[str, Any]:
    first = _words(source, source.randrange(8, 24))
    second = first[::-1] if number % 2 else _words(source, len(first))
    return {"sentence1": " ".join(first), "sentence2": " ".join(second), "label": number % 2, "idx": number}


METRIC = '''"""Accuracy, under the name that the examples load."""
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="accuracy", citation="", features=features)

    def _compute(self, predictions, references):
        right = sum(int(one == other) for one, other in zip(predictions, references))
        return {"accuracy": right / len(references)}
'''


def _write_bert(folder: Path, *, layers: int, width: int) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(SEED)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
    )
    model: Any = BertForSequenceClassification(config)  # type: ignore[no-untyped-call,unused-ignore]
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 128})
    )


def write_resnet(cache: Path) -> None:
    """Random weights under the name that timm's ``resnet50d`` has on the Hub, in a cache of it."""
    import timm
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    folder = cache / "models--timm--resnet50d.ra2_in1k"
    commit = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    save_file(timm.create_model("resnet50d").state_dict(), folder / "snapshots" / commit / "model.safetensors")


def write_instructions(folder: Path, *, count: int) -> None:
    """``data.json`` for litgpt's JSON data, and ``checkpoint/``: a small GPT with random weights and its tokenizer."""
    import torch
    import yaml
    from litgpt.config import Config
    from litgpt.model import GPT
    from tokenizers import Tokenizer, models, pre_tokenizers

    source = random.Random(SEED)
    rows = [
        {"instruction": " ".join(_words(source, 6)), "input": "", "output": " ".join(_words(source, 10))}
        for _ in range(count)
    ]
    (folder / "data.json").write_text(json.dumps(rows))
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    words = ["<|endoftext|>", "<unk>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPTNeoXTokenizer", "eos_token": "<|endoftext|>"})
    )
    (checkpoint / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))
    config = Config.from_name(
        "pythia-14m",
        n_layer=2,
        n_embd=64,
        n_head=4,
        intermediate_size=256,
        block_size=256,
        vocab_size=len(words),
        padded_vocab_size=128,
    )
    (checkpoint / "model_config.yaml").write_text(yaml.safe_dump(asdict(config)))
    torch.manual_seed(SEED)
    torch.save(GPT(config).state_dict(), checkpoint / "lit_model.pth")


if __name__ == "__main__":
    from public.cases import PROGRAMS

    for program in PROGRAMS:
        if program.name == sys.argv[1]:
            program.write_data(Path(sys.argv[2]))
