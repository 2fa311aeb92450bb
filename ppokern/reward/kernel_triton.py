"""Shaped rewards in Triton: KL, rewards and each sequence's score in one pass.

Bytes moved per token, in float32: 8 read and 8 written, 4 more for token rewards, 1 for a mask.

A tile of sequences is gone through from the ends backwards, so that the first unmasked position to
be met is the last one, which takes the score.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppokern import _launch
from ppokern import token_math_triton as tm
from ppokern._sequences import spoil
from ppokern.reward.reference import Inputs, Options

SHORT, LONG = (16, 64), (1, 1024)  # sequences and tokens of a tile: 4 tokens a thread
WARPS = 8

_TENSORS = ["scores", "logprobs", "ref_logprobs", "mask", "score_mask", "token_rewards"]
_TENSORS += ["cu_seqlens", "rewards", "kls"]


@triton.jit(do_not_specialize=[*_TENSORS, "sequences", "length", "tokens"])
def reward_kernel(
    scores,
    logprobs,
    ref_logprobs,
    mask,
    score_mask,
    token_rewards,
    cu_seqlens,
    sequences: tl.int64,
    length: tl.int64,  # of a sequence, where there is no cu_seqlens
    tokens: tl.int64,
    kl_coef: tl.float32,
    rewards,
    kls,
    KL: tl.constexpr,  # the kind of KL
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Go through ROWS sequences in tiles of STEPS tokens, from the ends backwards."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < sequences
    start, end = row * length, tl.where(there, (row + 1) * length, 0)
    if cu_seqlens is not None:
        start = tl.maximum(tl.load(cu_seqlens + row, there, other=0), 0)
        end = tl.minimum(tl.load(cu_seqlens + row + 1, there, other=0), tokens)
    given = there
    if score_mask is not None:
        given &= tl.load(score_mask + row, there, other=0) != 0
    score = tl.load(scores + row, given, other=0.0).to(tl.float32)

    waits = given  # for its last unmasked position
    longest = tl.max(tl.max(tl.where(there, end - start, 0), 1), 0)
    for behind in range(0, longest, STEPS):
        token = end - 1 - behind - tl.arange(0, STEPS)[None, :]
        inside = there & (token >= start)
        valid = inside
        if mask is not None:
            valid &= tl.load(mask + token, inside, other=0) != 0
        logprob = tl.load(logprobs + token, valid, other=0.0).to(tl.float32)
        ref_logprob = tl.load(ref_logprobs + token, valid, other=0.0).to(tl.float32)
        kl = tl.where(valid, tm.kl(logprob - ref_logprob, KL), 0.0)
        tl.store(kls + token, kl, inside)
        reward = tl.zeros(kl.shape, tl.float32)
        if kl_coef != 0.0:
            reward = -kl_coef * kl
        if token_rewards is not None:
            reward += tl.load(token_rewards + token, valid, other=0.0).to(tl.float32)
        last = tl.max(tl.where(valid, token, -1), 1, keep_dims=True)
        reward += tl.where(waits & valid & (token == last), score, 0.0)
        waits &= last < 0
        tl.store(rewards + token, reward, inside)


def shaped_rewards(x: Inputs, o: Options) -> tuple[Tensor, Tensor]:
    """Return rewards and KL, both per token."""
    like = x.logprobs
    rewards, kl = (
        torch.empty(like.shape, dtype=torch.float32, device=like.device) for _ in range(2)
    )
    tokens = like.numel()
    if tokens == 0:
        return rewards, kl
    length = like.shape[-1] if like.dim() else 1
    if x.cu_seqlens is not None:
        x = x._replace(cu_seqlens=x.cu_seqlens.to(torch.int64))
    sequences = tokens // length if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    rows, steps = SHORT if length <= SHORT[1] else LONG
    with _launch.on_device_of(like):
        reward_kernel[(triton.cdiv(sequences, rows),)](
            *(None if t is None else t.contiguous() for t in x), sequences, length, tokens,
            o.kl_coef, rewards, kl, KL=o.kl_kind, ROWS=rows, STEPS=steps, num_warps=WARPS,
        )  # fmt: skip
    spoil(x.cu_seqlens, tokens, rewards, kl)
    return rewards, kl
