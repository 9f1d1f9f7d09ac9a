"""Fine-tuning a transformer that classifies news, while memory grows: the features of every batch are kept for a plot.

stepscope run examples/gallery/finetune_text.py
stepscope run examples/gallery/finetune_text.py --fixed

The default size suits a CPU; `--layers 6 --width 768 --heads 12 --batch-size 32` is that of DistilBERT.  The texts are
generated: four topics, as in AG News, each with its own words.
"""

import argparse
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

TOPICS = {
    "world": "minister election border treaty president embassy protest army summit parliament",
    "sports": "coach season goal league striker final medal stadium referee champion",
    "business": "shares profit merger bank quarter investor market revenue oil dividend",
    "science": "researchers software satellite chip genome network telescope browser virus robot",
}
COMMON = "the a of to in on for with after before says new first more over will from by at as"
VOCABULARY = {word: index for index, word in enumerate(["[pad]", *" ".join((COMMON, *TOPICS.values())).split()])}
TOKENS = 48


class News(Dataset):
    """A sentence with some words of its topic, as token numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        words = random.Random(index)
        label = index % len(TOPICS)
        topic = list(TOPICS.values())[label].split()
        sentence = [words.choice(topic if words.random() < 0.2 else COMMON.split()) for _ in range(TOKENS)]
        return torch.tensor([VOCABULARY[word] for word in sentence]), label


class Classifier(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Parameter(torch.zeros(TOKENS, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, len(TOPICS))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.encoder(self.tokens(tokens) + self.positions)
        return self.head(features.mean(dim=1)), features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="keep one vector for each text")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(News(args.steps * args.batch_size), batch_size=args.batch_size)
    model = Classifier(args.width, args.layers, args.heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    kept = []  # for a plot of how the texts move while the model learns

    for step, (tokens, labels) in enumerate(loader):
        scores, features = model(tokens.to(device))
        loss = nn.functional.cross_entropy(scores, labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        features = features.detach()
        kept.append(features.mean(dim=1).cpu() if args.fixed else features)  # the fault: a vector for each token
        if step % 20 == 19:
            print(f"step {step + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
