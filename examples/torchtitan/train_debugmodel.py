"""torchtitan's own training of its debug model, on a GPU per rank or on the CPU, with random tokens and Penstock's pipeline.

torchrun --nproc-per-node 2 examples/torchtitan/train_debugmodel.py --training.steps 20
"""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torchtitan.tools.utils as titan

if not torch.cuda.is_available():  # torchtitan expects a GPU: this is all that its Trainer asks of it
    answers = dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"))
    answers |= {"device_count": 1, "current_device": 0, "get_device_name": "CPU", "memory_stats": {}}
    answers["get_device_properties"] = SimpleNamespace(total_memory=1)
    titan.device_module = SimpleNamespace(**{name: lambda *_, value=value: value for name, value in answers.items()})
    titan.device_type = "cpu"

from pipelining import pipeline_with_penstock
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.train import main


class RandomTokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, seq_len, local_batch_size, **_):
        self.shape = local_batch_size, seq_len + 1

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(2048, self.shape, generator=generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    encode = decode = get_vocab_size = None


def penstock_debugmodel():
    """Return the configuration of torchtitan's debug model with our pipelining function: torchtitan finds it by `--config`."""
    config = llama3_debugmodel()
    config.model_spec.pipelining_fn = pipeline_with_penstock
    for _, _, parent, name in config.model_spec.model.traverse(FlexAttention.Config):  # it has no backward on the CPU
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.dataloader, config.tokenizer = RandomTokens.Config(), NoTokenizer.Config()
    config.training.seq_len, config.training.disable_cuda_graphs, config.training.mixed_precision_param = 64, True, "float32"
    config.parallelism.pipeline_parallel_degree, config.debug.seed = 2, 0
    config.checkpoint.enable = config.validator.enable = False
    return config


if __name__ == "__main__":
    sys.argv[1:1] = ["--module", "train_debugmodel", "--config", "penstock_debugmodel"]
    main()
