"""A hash of each op's results and gradients over a matrix of calls.

    PYTHONPATH=. python tests/hashes.py

The same before and after a change that is to change no bit, on the same machine.
"""

import hashlib
import itertools

import calls
import torch
from matrix import FLOATS

import ppokern

SIZES = ((3, 5), (1, 1), (7, 40), (40, 33))


def digest(call: calls.Call, found: "hashlib._Hash") -> None:
    for x in call.run(call.leaves()):
        found.update(f"{x.dtype} {tuple(x.shape)} {x.stride()}".encode())
        found.update(bytes(x.detach().contiguous().clone().untyped_storage()))


def subsets(call: calls.Call) -> list[tuple[str, ...]]:
    """Of the inputs that are trained: all, and each alone."""
    return [call.flows, *([(name,) for name in call.flows] if len(call.flows) > 1 else [])]


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    backends = ppokern.available_backends()
    for backend, dtype, (rows, columns) in itertools.product(backends, FLOATS, SIZES):
        torch.manual_seed(rows)
        table = calls.every(dtype, rows, columns)
        if dtype == torch.float32:
            table |= {f"{name}, packed": call for name, call in calls.packed().items()}
        for name, call in table.items():
            for flows in subsets(call):
                try:
                    with ppokern.use_backend(backend):
                        key = f"{backend} {name}"
                        digest(call._replace(flows=flows), found.setdefault(key, hashlib.sha256()))
                except ValueError as error:
                    if "cannot do" not in str(error):
                        raise
    for key, each in found.items():
        print(each.hexdigest()[:16], key)
    print(hashlib.sha256("".join(x.hexdigest() for x in found.values()).encode()).hexdigest()[:16])


if __name__ == "__main__":
    main()
