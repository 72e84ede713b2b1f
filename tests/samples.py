"""PyTorch's own samples of batch norm, spelled as (input, weight, bias, mean, var, training, momentum, eps)."""

import torch
from torch.testing._internal.common_methods_invocations import op_db

NAMES = ("nn.functional.batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
OPINFOS = {info.name: info for info in op_db if info.name in NAMES and not info.variant_test_name}


def _spelled(name, sample):
    """A sample of an OpInfo as (input, weight, bias, mean, var, training, momentum, eps)."""
    if name == "nn.functional.batch_norm":
        order = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5} | sample.kwargs
        given |= dict(zip(order, sample.args, strict=False))
        return (sample.input, *(given[k] for k in ("weight", "bias", *order[:2], *order[4:])))
    if len(sample.args) == 6:  # the family: no flag
        return (sample.input, *sample.args[:4], True, *sample.args[4:])
    if len(sample.args) == 5:  # no_stats
        return (sample.input, *sample.args[:2], None, None, *sample.args[2:])
    return (sample.input, *sample.args)


def every_sample(name, dtype):
    torch.manual_seed(0)
    for sample in OPINFOS[name].sample_inputs("cpu", dtype, requires_grad=False):
        x, w, b, mean, var, training, momentum, eps = _spelled(name, sample)
        yield x, w, b, mean, var, training, 0.1 if momentum is None else momentum, eps


def samples(name, dtype):
    """The samples that are defined: [N, C, *], a variance to take, statistics to read."""
    for x, w, b, mean, var, training, *tail in every_sample(name, dtype):
        if x.ndim > 1 and ((training and x.numel() != x.shape[1]) or (not training and mean is not None)):
            yield x, w, b, mean, var, training, *tail


DTYPES = sorted({(n, d) for n, info in OPINFOS.items() for d in info.dtypes if d.is_floating_point}, key=str)
