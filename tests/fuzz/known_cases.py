"""Cases that once gave wrong numbers or a bad error, by name: each is equal now, or refused by a known rule.

Names tell what the case is about. A transport of `both` also compares threads with processes.
"""

from __future__ import annotations

KNOWN: dict[str, str] = {
    # Batches of as many leaves as arguments keep their structure.
    "input in a list": '{"inputs": "list", "microbatches": 2}',
    "input in a tuple": '{"inputs": "tuple", "microbatches": 2}',
    "input beside a list": '{"inputs": "tensor_and_list", "microbatches": 2}',
    "input in a dict": '{"inputs": "dict", "microbatches": 2}',
    "inputs in two dicts": '{"inputs": "two_dicts", "microbatches": 2}',
    "target in a list": '{"target": "list", "microbatches": 2}',
    "target in a tuple of a dict": '{"target": "tuple_of_dict", "microbatches": 2}',
    "keyword arguments and a list": '{"inputs": "list", "kwargs": [0], "microbatches": 2, "extra": 1}',
    # Objects that are not pytrees.
    "object between stages": '{"ranks": 2, "stages": [{"gives": "box"}]}',
    "object between stages of a split schedule": '{"schedule": "zb-h1", "ranks": 2, "stages": [{"gives": "box"}]}',
    "object between processes": '{"ranks": 2, "stages": [{"gives": "box"}], "transport": "both"}',
    "user dict between processes": '{"ranks": 2, "stages": [{"gives": "userdict"}], "transport": "both"}',
    "object beside a tensor": '{"ranks": 2, "stages": [{"gives": "box_in_tuple"}], "transport": "both"}',
    # Tensors of one message that share memory, one of them changed in place.
    "tensor twice, one changed": '{"ranks": 2, "stages": [{"gives": "twice"}, {"changes": "first"}]}',
    "tensor twice, one changed, on processes": '{"ranks": 2, "stages": [{"gives": "twice"}, {"changes": "first"}], "transport": "both"}',
    "tensor twice in a list": '{"schedule": "zbv", "ranks": 2, "stages": [{"gives": "twice_list"}, {"changes": "last"}]}',
    "tensor and a view, view changed": '{"ranks": 2, "stages": [{"gives": "view"}, {"changes": "last"}], "transport": "both"}',
    "tensor and a view, tensor changed": '{"ranks": 2, "stages": [{"gives": "view_dict"}, {"changes": "first"}], "transport": "both"}',
    "tensor and its detached self": '{"ranks": 2, "stages": [{"gives": "same_detached"}, {"changes": "last"}], "transport": "both"}',
    # Sums in higher precision while virtual ranks share a model.
    "accumulate dtype under chimera": '{"schedule": "chimera", "ranks": 2, "microbatches": 4, "accumulate_dtype": "float64"}',
    "accumulate dtype under dualpipe": '{"schedule": "dualpipe", "ranks": 2, "microbatches": 4, "accumulate_dtype": "float64"}',
    "accumulate dtype under chimera, models apart": (
        '{"schedule": "chimera", "ranks": 2, "microbatches": 4, "accumulate_dtype": "float64", "share": false}'
    ),
    # Gradients have the strides of their parameters.
    "strides of a linear weight": '{"schedule": "zb-h1", "stages": [{"layers": ["strided"]}]}',
    "strides and a fused optimizer": '{"schedule": "zb-h1", "ranks": 2, "stages": [{"layers": ["strided"]}], "script": ["step", "adamw"]}',
    "strides of a convolution": '{"schedule": "zbv", "stages": [{"layers": ["channels_last"]}], "script": ["step", "adamw", "step"]}',
    # Recomputed stages run stateful modules once.
    "recomputed batch norm": '{"microbatches": 2, "stages": [{"layers": ["batch_norm"]}], "recompute": [0], "script": ["step", "eval"]}',
    "recomputed counter": '{"microbatches": 2, "stages": [{"layers": ["linear", "counter", "linear"]}], "recompute": [0]}',
    "recomputed running mean": (
        '{"stages": [{"layers": ["linear", "running_mean", "linear"]}], "recompute": [0], "script": ["step", "eval"]}'
    ),
    "recomputed spectral norm": (
        '{"microbatches": 3, "stages": [{"layers": ["spectral_norm"]}], "recompute": [0], "script": ["step", "step"]}'
    ),
    "recomputed on a split schedule": (
        '{"schedule": "zbv", "ranks": 2, "microbatches": 3, "stages": [{}, {"layers": ["batch_norm"]}], "recompute": [1]}'
    ),
    # Copies of a stage share their statistics.
    "batch norm under chimera": (
        '{"schedule": "chimera", "ranks": 2, "microbatches": 4, "stages": [{"layers": ["batch_norm"]}], "script": ["step", "eval"], '
        '"share": false, "dtype": "float64"}'
    ),
    "batch norm under dualpipe, on processes": (
        '{"schedule": "dualpipe", "ranks": 2, "microbatches": 4, "stages": [{"layers": ["batch_norm"]}], "script": ["step", "eval"], '
        '"dtype": "float64", "transport": "both"}'
    ),
    "counter under chimera": (
        '{"schedule": "chimera", "ranks": 2, "microbatches": 2, "stages": [{"layers": ["counter"]}], "transport": "both"}'
    ),
    # A value that several stages read is changed by one of them.
    "mask of a skip edge": '{"ranks": 3, "skips": [[0, 2]], "stages": [{"gives": "mask"}, {"changes": "last"}], "transport": "both"}',
    "value of a skip edge": '{"ranks": 3, "skips": [[0, 2]], "stages": [{}, {"changes": "first"}], "transport": "both"}',
    # Stages of one rank read one message.
    "shared message": (
        '{"schedule": "zbv", "ranks": 2, "microbatches": 3, "skips": [[0, 2]], "stages": [{"gives": "dict"}, {}, {}, {}], '
        '"script": ["step", "eval", "step"], "transport": "both"}'
    ),
    "shared mask, changed by its first reader": (
        '{"schedule": "zbv", "ranks": 2, "skips": [[0, 2]], "stages": [{"gives": "mask"}, {"changes": "last"}, {}, {}], '
        '"transport": "both"}'
    ),
    "shared mask, changed by its last reader": (
        '{"schedule": "zbv", "ranks": 2, "skips": [[0, 2]], "stages": [{"gives": "mask"}, {}, {"changes": "last"}, {}], '
        '"transport": "both"}'
    ),
    "shared message into recomputed stages": (
        '{"schedule": "dualpipe-v", "ranks": 2, "microbatches": 4, "skips": [[0, 2], [0, 3]], "stages": [{"gives": "twice"}, {}, {}, {}], '
        '"recompute": [1, 2]}'
    ),
    # Batches that would not be cut.
    "object as input": '{"inputs": "box", "microbatches": 2, "reduction": "sum"}',
    "object beside the input": '{"inputs": "box_beside", "microbatches": 2}',
    "user dict beside the input": '{"inputs": "userdict", "microbatches": 2, "transport": "both"}',
    "array beside the input": '{"inputs": "array", "microbatches": 2, "transport": "both"}',
    "object as target": '{"target": "box", "microbatches": 2}',
    "array as target": '{"target": "array", "microbatches": 2}',
    # Gradients that a stage or a loss asks for in its forward.
    "gradient of a weight": '{"schedule": "zb-h1", "stages": [{"layers": ["weight_gradient"]}]}',
    "gradient of a weight, not optional": (
        '{"schedule": "zb-h1", "ranks": 2, "microbatches": 2, "stages": [{"layers": ["strict_weight_gradient"]}]}'
    ),
    "gradient of a weight in the loss": '{"schedule": "zb-h1", "loss": "adaptive"}',
    "gradient of a tied weight in the loss": '{"ranks": 2, "stages": [{"layers": ["tied"]}, {"layers": ["tied"]}], "loss": "adaptive"}',
    "another count that is summed in another order": '{"schedule": "looped-bfs", "script": ["step", "more"]}',
    "gradient penalty": '{"schedule": "zbv", "stages": [{"layers": ["penalty"]}]}',
    "step inside the forward": '{"schedule": "zb-h1", "stages": [{"layers": ["fast_weights"]}]}',
    "linear map of a nested tensor": '{"schedule": "zb-h1", "stages": [{"layers": ["nested"]}]}',
    "gradient of the input in a recomputed stage": '{"schedule": "zb-h1", "stages": [{"layers": ["input_gradient"]}], "recompute": [0]}',
    # Tensors that are more than their numbers.
    "tensor subclass": '{"ranks": 2, "stages": [{"gives": "subclass"}], "transport": "both"}',
    "attribute of a tensor": '{"ranks": 2, "stages": [{"gives": "attribute"}], "transport": "both"}',
    "wrapper subclass": '{"ranks": 2, "stages": [{"gives": "wrapper"}], "transport": "both"}',
    "sparse tensor between stages": '{"ranks": 2, "stages": [{"gives": "sparse"}], "transport": "both"}',
    "nested tensor between stages": '{"ranks": 2, "stages": [{"gives": "nested"}], "transport": "both"}',
    # Smaller ones.
    "buffer passed on and changed": (
        '{"ranks": 2, "microbatches": 2, "stages": [{"gives": "buffer"}, {"changes": "last"}], "transport": "both"}'
    ),
    "parameter passed on and changed": '{"ranks": 2, "stages": [{"gives": "weight"}, {"changes": "last"}], "transport": "both"}',
    "parameter added late": '{"script": ["step", "late", "step", "clip"]}',
    "optimizer step inside a hook": '{"microbatches": 2, "hooks": "step"}',
    "optimizer step inside the hook of a tied weight": (
        '{"ranks": 2, "stages": [{"layers": ["tied"]}, {"layers": ["tied"]}], "hooks": "step", "share": false}'
    ),
    "sparse gradients in higher precision": (
        '{"microbatches": 2, "stages": [{"layers": ["sparse_embedding"]}], "accumulate_dtype": "float64"}'
    ),
    "recomputed change of a dict's tensor": '{"ranks": 2, "stages": [{"gives": "dict"}, {"changes": "first"}], "recompute": [1]}',
    "recomputed change of a tensor that is there twice": (
        '{"ranks": 2, "stages": [{"gives": "twice"}, {"changes": "first"}], "recompute": [1]}'
    ),
    "value of a skip edge that is passed on and changed later": (
        '{"schedule": "zbv", "ranks": 2, "skips": [[0, 3]], "stages": [{}, {"layers": ["metric"]}, {"layers": ["in_place"]}]}'
    ),
    "input that every microbatch gets whole, changed": '{"microbatches": 2, "stages": [{"changes": "last"}], "inputs": "whole"}',
    "input that every microbatch gets whole, changed by a recomputed stage": (
        '{"microbatches": 2, "stages": [{"changes": "last"}], "inputs": "whole", "recompute": [0]}'
    ),
    "batch norm of a copy that is run again for a whole backward": (
        '{"schedule": "dualpipe", "ranks": 2, "stages": [{"layers": ["batch_norm"]}, {"layers": ["batch_norm"]}], "loss": "adaptive", '
        '"microbatches": 4, "dtype": "float64"}'
    ),
    "recomputed spectral norm that is written with its own value first": (
        '{"ranks": 2, "stages": [{"layers": ["gru", "penalty"]}, {"layers": ["spectral_norm"]}], "recompute": [1], '
        '"script": ["step", "step"], "number": 980}'
    ),
    "hook that wants a gradient in higher precision": (
        '{"schedule": "zb-h1", "stages": [{"layers": ["unused"]}], "accumulate_dtype": "float64", "hooks": "step"}'
    ),
    "optimizer step inside a hook on one of two copies": '{"schedule": "chimera", "ranks": 2, "share": false, "hooks": "step"}',
    "misaligned batch changed by a recomputed stage": (
        '{"microbatches": 2, "stages": [{"changes": "first"}], "recompute": [0], "extra": 2}'
    ),
    "recomputed change of a mask": '{"ranks": 2, "stages": [{"gives": "mask"}, {"changes": "last"}], "recompute": [1]}',
    "recomputed change of a batch's tensor": '{"inputs": "deep", "stages": [{"changes": "first"}], "recompute": [0]}',
    "recomputed change in place": '{"ranks": 2, "stages": [{}, {"changes": "first"}], "recompute": [1]}',
}
