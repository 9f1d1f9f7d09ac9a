"""Steps of a process without a device that are slow in one of three ways; the trace is written to a file.

python habits.py threads|optimizer|copies FILE
"""

import sys
import threading

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule


def tokenize(stop):
    text = "the quick brown fox " * 50
    while not stop.is_set():
        count_words(text)


def count_words(text):
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    for number in range(20_000):
        counts[number % 7] = number
    return counts


def collate():
    total = 0
    for number in range(100_000):
        total += number % 7
    return total


def main():
    habit, path = sys.argv[1:]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = 64
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(20)))
    optimizer = (
        torch.optim.Adam(model.parameters()) if habit == "optimizer" else torch.optim.SGD([*model.parameters()][:1])
    )
    image = torch.ones(64, 3, 256, 256)
    stop = threading.Event()
    thread = threading.Thread(target=tokenize, args=(stop,))
    if habit == "threads":
        thread.start()
    with profile(
        activities=[ProfilerActivity.CPU],
        with_stack=habit == "threads",
        schedule=schedule(wait=1, warmup=1, active=3),
        acc_events=False,
    ) as profiler:
        for _ in range(5):
            if habit == "threads":
                collate()
            if habit == "copies":
                image.to(torch.float64).transpose(1, 3).contiguous()
            loss = model(torch.ones(8, width)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    stop.set()
    profiler.export_chrome_trace(path)


if __name__ == "__main__":
    main()
