"""The names that options take: types for those who call, tuples of them for the checks."""

from typing import Literal, get_args

Aggregate = Literal["token_mean", "sequence_mean", "sequence_sum", "sum", "none"]
Backend = Literal["torch", "cpu", "triton", "cuda"]
KLKind = Literal["k1", "k2", "k3", "k3+"]
MaskMode = Literal["skip", "decay"]
PaddingSide = Literal["right", "left"]
Ratio = Literal["token", "sequence"]

AGGREGATES: tuple[str, ...] = get_args(Aggregate)
BACKENDS: tuple[str, ...] = get_args(Backend)
KL_KINDS: tuple[str, ...] = get_args(KLKind)
MASK_MODES: tuple[str, ...] = get_args(MaskMode)
PADDING_SIDES: tuple[str, ...] = get_args(PaddingSide)
RATIOS: tuple[str, ...] = get_args(Ratio)
