"""Many processes, started by torchrun: DDP or FSDP2, and what they have to agree on.

Sums go over all processes, and whatever is decided is decided from such a sum: so all of them step,
stop, skip and end together. Data orders and chance are drawn for all rows in every process, which
then takes its share; what a run does depends on the number of processes by rounding alone. With one
process nothing here does anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import PreTrainedModel

from . import heartbeat
from .config import UserError

# A process that dies ends the others at once: torchrun stops them, and gloo sees its socket close.
# One that is stopped or frozen is silent, see heartbeat.py. This is for one that is heard of and
# comes to no end; the others wait so long for a checkpoint, or for a slow reward function.
TIMEOUT = timedelta(minutes=30)

Module = TypeVar("Module", bound=nn.Module)
Item = TypeVar("Item")
Cut = list[int]


@contextmanager
def processes() -> Iterator[None]:
    """Joins the processes that torchrun has started; alone, does nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    with heartbeat.beating(rank(), size()):
        yield
        gathered(None)  # the first may have much left to write, and must be heard of until then
    dist.destroy_process_group()  # not after an error: it would wait for those that are stuck


def group() -> dist.ProcessGroup | None:
    """All processes; None where there is one."""
    return dist.group.WORLD if dist.is_initialized() else None


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if dist.is_initialized() else 0


def first() -> bool:
    """Whether this is the one that prints and writes."""
    return rank() == 0


def total(x: Tensor) -> Tensor:
    """The sum of `x` over all processes."""
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x)
    return x


def largest(x: float) -> float:
    """The largest of all processes' numbers, none of them NaN."""
    return max(gathered(x))


def gathered(x: Item) -> list[Item]:
    """What each process has, in their order."""
    if not dist.is_initialized():
        return [x]
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, x)
    return found


def from_first(work: Callable[[], Item]) -> Item:
    """What the first process makes of `work`, for all; so with a `UserError`."""
    found: list[Any] = [None, None]
    if first():
        try:
            found[0] = work()
        except UserError as error:
            found[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    if found[1] is not None:
        raise UserError(found[1])
    return found[0]


def share(count: int) -> range:
    """Which of `count` rows are this process's: neighbours, of a number alike in all processes."""
    return range(count * rank() // size(), count * (rank() + 1) // size())


def passes(cuts: Sequence[Cut]) -> Iterator[tuple[Cut, bool]]:
    """Micro-batches, and whether each is the step's last.

    Every process makes as many passes as the one with the most, as each is waited for by the
    others: what it lacks is `[]`, for which a pass over nothing has to be made.
    """
    most = max(gathered(len(cuts)))
    for number in range(most):
        yield cuts[number] if number < len(cuts) else [], number == most - 1


class Replicated(DistributedDataParallel):
    """DDP that shows the attributes of what it wraps."""

    def __getattr__(self, name: str) -> Any:
        """Its own first."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def wrap(module: Module, parallel: Literal["ddp", "fsdp"]) -> Module:
    """`module`, trained by all processes: held whole by each (DDP), or in parts (FSDP2).

    Its `forward` goes from token ids to log-probs, values or loss, so all that reads a weight is
    inside. FSDP2 gathers a block's weights when the block runs, the root's (embeddings and head,
    tied or not) for the whole of `forward`. Those that are not trained stay whole.
    """
    if size() == 1:
        return module
    if parallel == "ddp":
        wrapper: Any = Replicated(module)
        wrapper.broadcast_buffers = False  # they are constants; and then no forward pass waits
        return wrapper
    frozen = {p for p in module.parameters() if not p.requires_grad}  # the reference has them too
    blocks: Any = blocks_of(module)
    for block in blocks:
        fully_shard(block, reshard_after_forward=True, ignored_params=frozen)
    # What to gather next in a backward pass is guessed from forward passes, those of sampling too,
    # so that a process without a row would gather other than those with some: said for each block.
    for block, before in zip(blocks, [*blocks[:1], *blocks], strict=False):
        block.set_modules_to_backward_prefetch([before])
    fully_shard(module, reshard_after_forward=False, ignored_params=frozen)
    return module


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks of all trunks in a module."""
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    kinds = {name for model in models for name in model._no_split_modules or ()}
    return [part for part in module.modules() if type(part).__name__ in kinds]


def step_pass(module: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Around a forward and a backward pass: DDP sends gradients with the step's last one.

    FSDP2 sends them with each, as it would have to hold them whole in between. Both give the mean
    over the processes: a loss whose denominator counts all of them is to be multiplied by `size()`.
    """
    return module.no_sync() if isinstance(module, Replicated) and not last else nullcontext()


@contextmanager
def whole(*modules: nn.Module) -> Iterator[None]:
    """Inside, forward passes without gradients wait for no other process.

    FSDP2's weights are gathered once, so each process samples and scores as long as its own rows
    take. They must not be read or written here but by `forward`.
    """
    shards = [
        (part, part is not module)
        for module in modules
        for part in module.modules()
        if isinstance(part, FSDPModule)
    ]
    for part, _ in shards:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part, again in shards:
            part.reshard()
            part.set_reshard_after_forward(again, recurse=False)


def model_state(module: nn.Module) -> dict[str, Tensor]:
    """All weights by name; with FSDP2 on the CPU, in the first process only. All must call it.

    Of names for one tensor (a tied head) the first in the alphabet is kept; see `with_ties`.
    """
    bare = module.module if isinstance(module, Replicated) else module
    if _sharded(bare):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(bare, options=options)
    else:
        state = bare.state_dict()
    others = _other_names(bare)
    return {name: x.contiguous() for name, x in state.items() if name not in others}


def load_model_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Takes back what `model_state` gave, in each process the whole of it."""
    bare = module.module if isinstance(module, Replicated) else module
    state = with_ties(bare, state)
    if _sharded(bare):
        set_model_state_dict(bare, state, options=StateDictOptions(full_state_dict=True))
    else:
        bare.load_state_dict(state)


def with_ties(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """`state` with all names of a tensor."""
    others = _other_names(module).items()
    return state | {other: state[name] for other, name in others if name in state}


def _sharded(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _other_names(module: nn.Module) -> dict[str, str]:
    """Further names of tensors, and the one that is kept."""
    kept: dict[Tensor, str] = {}
    named = sorted(module.named_parameters(remove_duplicate=False))
    firsts = [(name, kept.setdefault(parameter, name)) for name, parameter in named]
    return {name: first for name, first in firsts if name != first}


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimiser, the same whether its parameters are sharded. All must call it.

    Sharded moments are whole in the first process only.
    """
    state = optimizer.state_dict()
    state["state"] = {
        index: {name: _for_first(x) for name, x in moments.items()}
        for index, moments in state["state"].items()
    }
    return state


def _for_first(x: Any) -> Any:
    if not isinstance(x, DTensor):
        return x
    whole = x.full_tensor()
    return whole.cpu() if first() else whole.new_empty(0)


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Takes back what `optimizer_state` gave, in each process the whole of it."""
    parameters = [p for held in optimizer.param_groups for p in held["params"]]
    for index, moments in state["state"].items():
        p = parameters[index]
        for name, x in moments.items() if isinstance(p, DTensor) else ():
            if x.shape == p.shape:  # a moment; the count of steps is not sharded
                moments[name] = distribute_tensor(x.to(p.device), p.device_mesh, p.placements)
    optimizer.load_state_dict(state)
