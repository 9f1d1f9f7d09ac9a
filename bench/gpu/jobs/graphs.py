"""CUDA graphs by hand: the whole step captured and replayed with static tensors, or parts of the model only."""

import torch
from common import CLASSES, FEATURES, Report, arguments, batches, network, seed
from torch.nn.functional import cross_entropy

REPLAYS = 200
WARM_UP = 3


def whole(optimizer_of, device, report):
    """As in torch's documentation: warm up on a side stream, capture forward, backward and optimizer, replay."""
    model = network().to(device)
    optimizer = optimizer_of(model.parameters())
    x = torch.zeros(32, FEATURES, device=device)
    y = torch.zeros(32, dtype=torch.long, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(x), y).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    for step, (new_x, new_y) in enumerate(batches(device, REPLAYS)):
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        report.loss(step, loss)
    return WARM_UP + REPLAYS


def partial(device, report):
    """Two layers as graphed callables, the head and the optimizer without."""
    body = network().to(device)
    head = torch.nn.Linear(CLASSES, CLASSES).to(device)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05)
    body = torch.cuda.make_graphed_callables(body, (torch.randn(32, FEATURES, device=device),))
    for step, (x, y) in enumerate(batches(device, REPLAYS)):
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(head(body(x)), y)
        loss.backward()
        optimizer.step()
        report.loss(step, loss)
    return REPLAYS


def main():
    args = arguments("capture", ("whole", "whole_adam", "partial"))
    seed()
    device = torch.device(args.device)
    report = Report()
    if args.capture == "partial":
        steps = partial(device, report)
    elif args.capture == "whole":
        steps = whole(lambda parameters: torch.optim.SGD(parameters, lr=0.05), device, report)
    else:
        steps = whole(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, capturable=True), device, report)
    torch.cuda.synchronize()
    report.steps(steps)


if __name__ == "__main__":
    main()
