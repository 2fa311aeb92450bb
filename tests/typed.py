"""The type checker of the annotation test: beartype that takes an int for a float, as PEP 484."""

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
