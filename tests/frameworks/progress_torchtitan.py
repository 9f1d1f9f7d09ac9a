"""A loop on a CPU that logs with torchtitan's own ``MetricsProcessor``; ``progress_torchtitan.py FIRST LAST``.

Its trainer needs a GPU.  Of the processor only the parts that ask for one are replaced.
"""

import inspect
import sys
import time
from types import SimpleNamespace

import torch
from torchtitan.components.metrics import DeviceMemStats, MetricsProcessor
from torchtitan.components.validate import Validator
from torchtitan.tools import utils
from torchtitan.tools.logging import init_logger


class Processor(MetricsProcessor):
    def __init__(self):
        self.num_flops_per_token, self.gpu_peak_flops, self.has_quantization = 1e6, 1e12, False
        self.parallel_dims = SimpleNamespace(non_data_parallel_size=1)
        self.config = SimpleNamespace(log_freq=5)
        memory = DeviceMemStats(*[0] * len(inspect.signature(DeviceMemStats).parameters))
        self.device_memory_monitor = SimpleNamespace(
            get_peak_stats=lambda: memory, reset_peak_stats=lambda: None, device_capacity_gib=80.0
        )
        self.logger = SimpleNamespace(log=lambda metrics, step: None)
        self.color = utils.Color()
        self.ntokens_since_last_log, self.data_loading_times, self.time_last_log = 0, [], time.perf_counter()


def main(first, last):
    init_logger()
    assert list(inspect.signature(Validator.validate).parameters)[:3] == ["self", "model_parts", "step"]
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    processor = Processor()
    for step in range(first, last + 1):
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        processor.ntokens_since_last_log += 1000
        processor.data_loading_times.append(0.001)
        if processor.should_log(step):
            processor.log(step, loss.item(), loss.item(), 1.0)


main(int(sys.argv[1]), int(sys.argv[2]))
