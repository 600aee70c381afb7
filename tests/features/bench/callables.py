"""Callables that comparisons are given: honest ones, and one for each thing that makes a comparison mean nothing."""

SOURCE = '''\
import functools
import os
import threading
import time

import torch


def product(a, b):
    return a @ b


def twin(a, b):
    return torch.matmul(a, b)


def low(a, b):
    return (a.bfloat16() @ b.bfloat16()).float()


def wide(a, b):
    return (a.double() @ b.double()).float()


def tiled(a, b):
    """Forgets the last rows where their number is not a multiple of 64."""
    result = torch.zeros(a.shape[0], b.shape[1])
    whole = a.shape[0] // 64 * 64
    result[:whole] = a[:whole] @ b
    return result


def even_rows(a, b):
    if a.shape[0] % 64:
        raise ValueError("rows must be a multiple of 64")
    return a @ b


def clean(a, b):
    return torch.nan_to_num(a) @ b


def drifts(a, b):
    return a @ b * (1 + 1e-6 * torch.rand(()))


def drops(a, b):
    return torch.nn.functional.dropout(a @ b)


def factor(a):
    return torch.linalg.cholesky(a)


def factor_too(a):
    return torch.linalg.cholesky(a)


def positive_definite(device, seed):
    a = torch.randn(16, 16, device=device)
    return a @ a.T + torch.eye(16)


def slowed(a, b):
    """Does half as much work again."""
    a[: a.shape[0] // 2] @ b
    return a @ b


def one(a):
    return a


def transposed(a, b):
    return (a @ b).T


def halves(a, b):
    return (a @ b).half()


def in_place(a, b):
    return a.mul_(2) @ b


def nothing(a, b):
    a @ b


def word(a, b):
    return "done"


def raises(a, b):
    raise ValueError("no such kernel")


def crashes(a, b):
    os.abort()


def infinite(a, b):
    return a @ b / 0


def talks(a, b):
    print("hello " * 1000)
    return a @ b


def switches(a, b):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return a @ b


def threads(a, b):
    threading.Thread(target=time.sleep, args=(3,), name="helper", daemon=True).start()
    return a @ b


@functools.cache
def _known(address, shape):
    return {}


def remembers(a, b):
    known = _known(a.data_ptr(), b.data_ptr())
    if "result" not in known:
        known["result"] = a @ b
    return known["result"]


def remembers_weight(a, b):
    known = _known(b.data_ptr(), 0)
    if "weight" not in known:
        known["weight"] = b.clone()
    return a @ known["weight"]


def constant(a, b):
    return torch.ones(a.shape[0], b.shape[1])


class Layer:
    def __call__(self, a, b):
        return a @ b


layer = Layer()
number = 3


def rounds_inside(a, b):
    return (a.float() @ b.float()).to(a.dtype)


def refuses_fp64(a, b):
    if a.dtype is torch.float64:
        raise TypeError("float32 only")
    return a @ b


def inputs(device, seed):
    return {"a": torch.randn(64, 32, device=device), "b": torch.randn(32, 64, device=device)}


def other_inputs(device, seed):
    return torch.full((64, 32), float(time.perf_counter_ns() % 997)), torch.ones(32, 64)


def no_inputs(device, seed):
    return 3
'''
