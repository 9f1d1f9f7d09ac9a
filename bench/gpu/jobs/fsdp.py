"""Fully sharded data parallel: FSDP2 (also with mixed precision and CPU offload) and FSDP1."""

import torch
import torch.distributed as dist
from common import Report, arguments, batches, network, seed, start_ranks
from torch.nn.functional import cross_entropy

STEPS = 40


def sharded(variant, device):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    settings = {}
    if variant == "fsdp2_mixed":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if variant == "fsdp2_offload":
        settings["offload_policy"] = CPUOffloadPolicy()
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    model = network()
    if variant != "fsdp2_offload":
        model = model.to(device)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def sharded_by_fsdp1(device):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        network().to(device),
        device_id=device,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        use_orig_params=True,
    )


def main():
    args = arguments("variant", ("fsdp2", "fsdp2_mixed", "fsdp2_offload", "fsdp1"))
    device = start_ranks(args.device)
    seed()
    model = sharded_by_fsdp1(device) if args.variant == "fsdp1" else sharded(args.variant, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = Report()
    for step, (x, y) in enumerate(batches(device, STEPS)):
        loss = cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.loss(step, loss)
    report.steps(STEPS)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
