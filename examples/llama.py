"""A small LLaMA from a config of Transformers under DistributedDataParallel (gloo): random weights, no downloads.

torchrun --standalone --nproc-per-node 2 examples/llama.py
stepscope run --nproc-per-node 2 examples/llama.py --fault straggler
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

VOCABULARY = 256
LENGTH = 64


class Text(Dataset):
    """Sequences that count upwards; on one rank they may lie on a slow disk."""

    def __init__(self, count: int, *, slow: bool) -> None:
        self.count, self.slow = count, slow

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow:
            time.sleep(0.02)
        return (index + torch.arange(LENGTH)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--fault", choices=["none", "straggler", "input", "memory"], default="none")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = DistributedDataParallel(LlamaForCausalLM(config))
    if args.fault == "straggler" and rank == 1:
        # As if the rank's processor were slow: each attention takes 20 ms more.
        for module in model.modules():
            if isinstance(module, LlamaAttention):
                module.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = Text(args.steps * args.batch_size * world_size, slow=args.fault == "input" and rank == 1)
    loader = DataLoader(text, args.batch_size, sampler=DistributedSampler(text))

    kept = []
    for step, tokens in enumerate(loader, start=1):
        outputs = model(input_ids=tokens, labels=tokens)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.fault == "memory" and rank == 1:
            kept.append(outputs.logits.detach().repeat(32, 1, 1))
        if rank == 0 and (step % 20 == 0 or step == args.steps):
            print(f"step {step}  loss {outputs.loss.item():.4f}")

    # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
